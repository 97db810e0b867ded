"""`verl-fuse run NAME`: runs a shipped recipe through verl's own entry point, in a child process."""

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

import typer
from omegaconf import DictConfig
from rich.console import Console

from verl_fuse.cli import child, earlier
from verl_fuse.cli.checks import check_data_file, data_files, problems_of
from verl_fuse.cli.composition import compose_what_fits, select, select_path
from verl_fuse.cli.crash import cause
from verl_fuse.cli.locked import alone
from verl_fuse.cli.output import examples, note
from verl_fuse.cli.recipes import Recipe, find_recipe
from verl_fuse.cli.report import print_summary, read_metrics
from verl_fuse.cli.screen import Tail, last_lines
from verl_fuse.cli.shell import TRAINER
from verl_fuse.compare.run import METRICS_FILE, METRICS_PATH_VARIABLE
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.start.data_rows import row_refusals
from verl_fuse.host.start.resumption import nothing_left
from verl_fuse.host.switch import VARIABLE, switched_off
from verl_fuse.host.upstream.checkpoints import newest_in, step_of
from verl_fuse.spec.run_config import FILES as CONFIG_FILES
from verl_fuse.timeline.files import INDEX_PAGE

app = typer.Typer(add_completion=False)

HOME_VARIABLE = "VERL_FUSE_HOME"
# The log has all output of the run.
LOG = "run.log"
# The message about a run that broke off shows this many lines of the log.
LAST_LINES = 12
# Stock verl: its own trainer, and no block of ours in the configuration.
BASELINE = ("trainer.v1.trainer_mode=sync", "~fuse")
# Tasks that recipes can ask for in `recipe.prepare`: the module that makes the task with `--out task_dir`.
TASKS = {
    "euclid": ("verl_fuse_cpu.task",),
    "euclid-4-layers": ("verl_fuse_cpu.task", "--layers", "4"),
    "euclid-tools": ("verl_fuse_cpu.task", "--tools"),
    "smollm2": ("verl_fuse_cpu.task", "--model", "smollm2"),
}


@dataclass(frozen=True)
class PlannedRun:
    """A planned run: the command that makes the task first (or None), the training command, and the variables that both
    get in addition.

    `resumed` is the step of `run_dir` that the run goes on after (None: from the start), `going_on` names the command
    that goes on where this run stops, `notes` are the lines that the run prints first, `config` is the composed
    configuration, and `done` the sentence on a run that has nothing left to do (None: it has).
    """

    prepare: tuple[str, ...] | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    data_files: tuple[str, ...]
    run_dir: Path
    resumed: int | None = None
    going_on: str = "the same command"
    notes: tuple[str, ...] = ()
    config: DictConfig = field(default_factory=lambda: DictConfig({}))
    done: str | None = None

    @property
    def metrics(self) -> Path:
        return Path(self.environment[METRICS_PATH_VARIABLE])

    @property
    def log(self) -> Path:
        return self.run_dir / LOG


@app.command(
    epilog=examples(
        "verl-fuse run ppo-cpu",
        "verl-fuse run ppo-cpu fuse.interstage.enabled=true trainer.total_training_steps=4",
        "verl-fuse run ppo-gsm8k-8gpu --dry-run",
    )
)
def run(
    name: Annotated[str, typer.Argument(help="Name of the recipe (verl-fuse recipes).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as verl takes them.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Stock verl, same everything else.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the commands and run nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that verl, Ray and vLLM print.")] = False,
) -> None:
    """Run a recipe with verl-fuse on (or --baseline: stock verl) and sum it up."""
    recipe = find_recipe(name)
    require_version()
    launch = plan(recipe, overrides or [], baseline=baseline, home=home_from(os.environ))
    if launch.done:
        note(launch.done)
        return
    if dry_run:
        for line in launch.notes:
            note(line)
        typer.echo("\n".join(as_shell(launch)))
        return
    raise typer.Exit(execute(launch, verbose=verbose))


def home_from(environment: Mapping[str, str]) -> Path:
    """Return the folder of runs and tasks: $VERL_FUSE_HOME, or `runs` in the working directory."""
    return Path(environment.get(HOME_VARIABLE) or "runs").absolute()


def plan(recipe: Recipe, overrides: list[str], *, baseline: bool, home: Path) -> PlannedRun:
    """Plan the run, with every check that is possible before anything is started; a FuseError lists every problem."""
    chosen = [f"trainer.experiment_name={recipe.name}-baseline", *BASELINE, *overrides] if baseline else overrides
    config, problems = compose_what_fits(recipe, chosen)
    return planned(config, problems, ["--config-path", str(recipe.folder), "--config-name", "config", *chosen], home)


def planned(config: DictConfig, problems: list[str], arguments: Sequence[str], home: Path) -> PlannedRun:
    """Plan the run of a composed configuration, which `arguments` of main_ppo compose to; a FuseError lists `problems`
    and every other one."""
    # The recipes read the variable through oc.env, and so do trials of `tune`.
    os.environ[HOME_VARIABLE] = str(home)
    run_dir = Path(select_path(config, "trainer.default_local_dir")).absolute()
    # Unbuffered output: a line is shown when it is printed, not when a buffer is full.
    environment = {
        HOME_VARIABLE: str(home),
        METRICS_PATH_VARIABLE: str(run_dir / METRICS_FILE),
        "PYTHONUNBUFFERED": "1",
    }
    if switched_off():
        environment[VARIABLE] = "off"
    if select(config, "trainer.device") == "cpu":
        from verl_fuse_cpu.environment import environment as cpu_environment

        environment |= cpu_environment()
    prepare, task = None, select(config, "recipe.prepare")
    if task is not None:
        if not isinstance(task, str) or task not in TASKS:
            raise FuseError(f"recipe.prepare={task!r}: allowed: {', '.join(TASKS)}, or null to make nothing")
        prepare = (sys.executable, "-m", *TASKS[task], "--out", select_path(config, "task_dir"))
    files = tuple(data_files(config))
    found, notes = problems_of(config, {**environment, **os.environ})
    if problems := [*problems, *found]:
        raise FuseError(*problems)
    command = (sys.executable, "-m", TRAINER, *arguments)
    resumed = earlier.resumed_step(config, run_dir)
    auto = select(config, "trainer.resume_mode") == "auto"
    going_on = "the same command" if auto else "the same command with trainer.resume_mode=auto"
    return PlannedRun(
        prepare,
        command,
        environment,
        files,
        run_dir,
        resumed,
        going_on,
        notes,
        config,
        nothing_left(config),
    )


_ELSEWHERE = "trainer.experiment_name, or trainer.default_local_dir, names another folder"


def execute(launch: PlannedRun, *, verbose: bool = False) -> int:
    """Make the task, check the data, train and print the summary; return the exit code of the part that ended last."""
    with alone(launch.run_dir, "verl-fuse makes a run", _ELSEWHERE):
        return _executed(launch, verbose=verbose)


def _executed(launch: PlannedRun, *, verbose: bool) -> int:
    page = launch.run_dir / INDEX_PAGE
    before = _written(page)
    with _output(launch, verbose=verbose) as (log, poll):
        if launch.prepare is not None:
            note("the task is made, if it is not there yet")
        made = prepare(launch, log, poll)
        if made.stopped_by is not None:
            note(f"stopped by {made.stopped_by.name} before training began; the same command starts anew")
            return 128 + made.stopped_by
        if made.code:
            note(f"making the task ended with exit code {made.code}" + _why(launch, verbose=verbose))
            return made.code
        note("verl starts" if launch.resumed is None else f"verl starts after step {launch.resumed}")
        ending, logged = train(launch, log, poll)
    code = ending.code
    # The exit code of a run that was told to stop is no fault: Ray's driver aborts with 134, for example.
    if ending.stopped_by is not None and code:
        code = 128 + ending.stopped_by
    try:
        if logged and launch.resumed is not None:
            earlier.join(launch.metrics, launch.resumed)
        if logged:
            print_summary(Console(), launch.metrics)
    except FuseError as error:
        # A half-written file of a run that broke off must not hide the run's exit code.
        if not code:
            raise
        note(str(error))
    named = (
        ("Timeline", page, _written(page) != before),
        ("Metrics", launch.metrics, logged),
        ("Log", launch.log, not verbose),
    )
    for name, path, wrote in named:
        if wrote:
            typer.echo(f"{name}: {path}")
    if code and ending.stopped_by is not None:
        note(stopped(launch, ending.stopped_by, launch.metrics if logged else None))
    elif code:
        note(f"verl ended with exit code {code}" + _why(launch, verbose=verbose))
    elif ending.stopped_by is not None:
        note(f"{ending.stopped_by.name}: verl had ended, or ended by itself, with exit code 0")
        return 128 + ending.stopped_by
    return code


def prepare(launch: PlannedRun, log: IO[bytes] | None, poll: Callable[[], None] = lambda: None) -> child.Ending:
    """Make the task, if the recipe has one, and check the data; a FuseError tells what is wrong with it."""
    made = child.Ending(0, None)
    if launch.prepare is not None:
        made = child.run(launch.prepare, _variables(launch), log, poll)
    if made.stopped_by is not None or made.code:
        return made
    for file in launch.data_files:
        check_data_file(file)
    # The task may have been made just now.
    if problems := list(row_refusals(launch.config)):
        raise FuseError(*problems)
    return made


def train(
    launch: PlannedRun, log: IO[bytes] | None, poll: Callable[[], None] = lambda: None, limit: float = math.inf
) -> tuple[child.Ending, bool]:
    """Train for at most `limit` seconds; return how that ended, and whether there are metrics of this run."""
    # A configuration stays with the metrics and the timeline that it belongs to.
    files, page = (launch.metrics, *(launch.run_dir / name for name in CONFIG_FILES)), launch.run_dir / INDEX_PAGE
    kept, before, code = dict[Path, Path | None](), _written(page), None
    try:
        for file in files:
            kept[file] = earlier.move_away(file)
        ending = child.run(launch.command, _variables(launch), log, poll, limit)
        code = ending.code
    finally:
        logged = launch.metrics.exists() and launch.metrics.stat().st_size > 0
        # A run that was not to log to a file has its configuration alone.
        ran = code == 0 and any(file.exists() for file in files)
        if not (logged or ran or _written(page) != before):
            earlier.put_back(kept)
    return ending, logged


def _variables(launch: PlannedRun) -> dict[str, str]:
    """Return the run's environment. The user's variables win, but the metrics must be where the summary looks for
    them."""
    return {**launch.environment, **os.environ, METRICS_PATH_VARIABLE: launch.environment[METRICS_PATH_VARIABLE]}


@contextmanager
def _output(launch: PlannedRun, *, verbose: bool) -> Iterator[tuple[IO[bytes] | None, Callable[[], None]]]:
    """Yield (the log, a function that shows the lines of the log that matter), or (None, a function that does nothing)
    to print to the screen itself."""
    if verbose:
        yield None, lambda: None
        return
    earlier.move_away(launch.log)
    with launch.log.open("wb") as log:
        note(f"everything that is printed goes to {launch.log}")
        tail = Tail(launch.log, typer.echo)
        try:
            yield log, tail.read
        finally:
            tail.close()


def stopped(launch: PlannedRun, by: signal.Signals, metrics: Path | None) -> str:
    """Return a sentence on the run that was told to stop, and on how to go on."""
    steps = [step for step, values in (read_metrics(metrics) if metrics else ()) if "timing_s/step" in values]
    done = f"after step {steps[-1]}" if steps else "before its first step was done"
    checkpoint = newest_in(launch.run_dir)
    if checkpoint is None:
        return (
            f"stopped by {by.name} {done}; no checkpoint was saved (trainer.save_freq), so the same command starts anew"
        )
    step = step_of(str(checkpoint))
    return f"stopped by {by.name} {done}; {launch.going_on} goes on from the checkpoint of step {step}"


def _why(launch: PlannedRun, *, verbose: bool) -> str:
    """Return the cause of a crash and the last lines of the log; nothing with `verbose`, since both stand on the
    screen."""
    if verbose:
        return ""
    error = cause(launch.log)
    last = "\n  ".join(last_lines(launch.log, LAST_LINES))
    return (f": {error}" if error else "") + f"\nThe last lines of {launch.log}:\n  {last}"


def _written(path: Path) -> int | None:
    """Return the time the file was written, in ns; None if there is no file."""
    return path.stat().st_mtime_ns if path.exists() else None


def as_shell(launch: PlannedRun) -> Iterator[str]:
    """Yield lines to paste into a shell."""
    for name, value in launch.environment.items():
        yield f"export {name}={shlex.quote(value if name == METRICS_PATH_VARIABLE else os.environ.get(name, value))}"
    if launch.prepare is not None:
        yield shlex.join(launch.prepare)
    yield f"mkdir -p {shlex.quote(str(launch.run_dir))}"
    yield shlex.join(launch.command)
