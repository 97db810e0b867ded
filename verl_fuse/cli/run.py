"""`verl-fuse run NAME`: run a shipped recipe through verl's own entry point, in a child process."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import DictConfig
from rich.console import Console

from verl_fuse.cli import child
from verl_fuse.cli.composition import compose, select, select_path
from verl_fuse.cli.recipes import Recipe, find_recipe
from verl_fuse.cli.report import print_summary
from verl_fuse.errors import FuseError
from verl_fuse.host.compat.start import require_version
from verl_fuse.timeline.files import INDEX_PAGE

app = typer.Typer(add_completion=False)

HOME = "VERL_FUSE_HOME"
METRICS = "VERL_FILE_LOGGER_PATH"
# Stock verl: its own trainer, and no block of ours in the configuration.
BASELINE = ("trainer.v1.trainer_mode=sync", "~fuse")
PARQUET_MAGIC = b"PAR1"
# Tasks that recipes can ask for in `recipe.prepare`: the module that makes one with `--out task_dir`.
TASKS = {"euclid": ("verl_fuse_cpu.task",), "euclid-4-layers": ("verl_fuse_cpu.task", "--layers", "4")}


@dataclass(frozen=True)
class Launch:
    """What will be run: the command that makes the task first (or None), the training command, and what they add to the environment."""

    prepare: tuple[str, ...] | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    data_files: tuple[str, ...]
    run_dir: Path

    @property
    def metrics(self) -> Path:
        return Path(self.environment[METRICS])


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Name of the recipe (verl-fuse recipes).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as verl takes them.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Stock verl, same everything else.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and run nothing.")] = False,
) -> None:
    """Run a recipe with verl-fuse on (or --baseline: stock verl) and sum it up."""
    recipe = find_recipe(name)
    require_version()
    launch = plan(recipe, overrides or [], baseline=baseline, home=home_from(os.environ))
    if dry_run:
        typer.echo("\n".join(as_shell(launch)))
        return
    raise typer.Exit(execute(launch))


def home_from(environment: Mapping[str, str]) -> Path:
    """Where runs and tasks are kept: $VERL_FUSE_HOME, or `runs` in the working directory."""
    return Path(environment.get(HOME) or "runs").absolute()


def plan(recipe: Recipe, overrides: list[str], *, baseline: bool, home: Path) -> Launch:
    """Everything about the run that can be known and refused before anything is started."""
    name = f"{recipe.name}-baseline" if baseline else recipe.name
    chosen = [f"trainer.experiment_name={name}", *BASELINE, *overrides] if baseline else overrides
    # The recipes read it through oc.env.
    os.environ[HOME] = str(home)
    config = compose(recipe, chosen)
    run_dir = Path(select_path(config, "trainer.default_local_dir")).absolute()
    environment = {HOME: str(home), METRICS: str(run_dir / "metrics.jsonl")}
    if select(config, "trainer.device") == "cpu":
        from verl_fuse_cpu.environment import environment as cpu_environment

        environment |= cpu_environment()
    prepare, task = None, select(config, "recipe.prepare")
    if task is not None:
        if not isinstance(task, str) or task not in TASKS:
            raise FuseError(f"recipe.prepare={task!r}: allowed: {', '.join(TASKS)}, or null to make nothing")
        prepare = (sys.executable, "-m", *TASKS[task], "--out", select_path(config, "task_dir"))
    command = (
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "--config-path",
        str(recipe.folder),
        "--config-name",
        "config",
        *chosen,
    )
    return Launch(prepare, command, environment, tuple(data_files(config)), run_dir)


def execute(launch: Launch) -> int:
    """Make the task, check the data, train, print the summary; the exit code of what ended last."""
    # What the user has set wins, but the metrics must be where the summary looks for them.
    environment = {**launch.environment, **os.environ, METRICS: launch.environment[METRICS]}
    if launch.prepare is not None and (code := subprocess.run(launch.prepare, env=environment).returncode):
        return code
    for file in launch.data_files:
        check_data_file(file)
    try:
        launch.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FuseError(f"trainer.default_local_dir={launch.run_dir} cannot be made: {error.strerror}") from error
    keep_earlier(launch.metrics)
    code = child.run(launch.command, environment)
    if code:
        typer.echo(f"verl-fuse: verl ended with exit code {code}", err=True)
    try:
        print_summary(Console(), launch.run_dir, launch.metrics, launch.run_dir / INDEX_PAGE)
    except FuseError as error:
        # What a run that broke off left half-written must not hide how it ended.
        if not code:
            raise
        typer.echo(f"verl-fuse: {error}", err=True)
    return code


def as_shell(launch: Launch) -> Iterator[str]:
    """Lines to paste into a shell."""
    for name, value in launch.environment.items():
        yield f"export {name}={shlex.quote(value if name == METRICS else os.environ.get(name, value))}"
    if launch.prepare is not None:
        yield shlex.join(launch.prepare)
    yield f"mkdir -p {shlex.quote(str(launch.run_dir))}"
    yield shlex.join(launch.command)


def data_files(config: DictConfig) -> Iterator[str]:
    """The local files of data.train_files and data.val_files."""
    for key in ("data.train_files", "data.val_files"):
        value = select(config, key)
        files = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise FuseError(f"{key}={value!r}: needs a path, a list of paths, or null")
        yield from (file for file in files if "://" not in file)


def check_data_file(file: str) -> None:
    """Raise a FuseError unless `file` can be read and, if its name says so, looks like Parquet."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            start = opened.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise FuseError(
            f"data file {path} cannot be read: {error.strerror} (data.train_files, data.val_files)"
        ) from error
    if path.suffix == ".parquet" and start != PARQUET_MAGIC:
        raise FuseError(f"data file {path} is not a Parquet file: it starts with {start!r}, not {PARQUET_MAGIC!r}")


def keep_earlier(metrics: Path) -> None:
    """verl empties the metrics file when it starts; an earlier run's file moves to metrics.N.jsonl."""
    if not metrics.exists():
        return
    number = 1
    while (kept := metrics.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    metrics.rename(kept)
