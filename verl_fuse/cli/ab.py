"""`verl-fuse ab NAME`: runs a recipe as stock verl, in observe mode or both, then with verl-fuse, and compares."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from verl_fuse.cli.compare import AtLeast, Html, WarmUp, check_options, judge
from verl_fuse.cli.composition import select
from verl_fuse.cli.output import Json, examples, note
from verl_fuse.cli.recipes import Recipe, find_recipe
from verl_fuse.cli.run import PlannedRun, execute, home_from, plan
from verl_fuse.compare.run import METRICS_FILE
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.switch import require_on
from verl_fuse.spec.block import key_of
from verl_fuse.spec.step import Refusal

app = typer.Typer(add_completion=False)

# Observe mode: verl's own stages and a timeline, whatever the recipe switches on.
OBSERVE = ("fuse=default", "fuse.preset=observe", "trainer.v1.trainer_mode=fuse")
Baseline = Literal["stock", "observe", "both"]

# Overrides that stock verl has no key for, or that switch verl-fuse on.
_FUSED_ONLY = re.compile(r"[+~]*(fuse\b|trainer\.v1\.trainer_mode\b)")
# verl's name of the logger that writes the metrics.
_COMPARED = "file"


@app.command(
    epilog=examples(
        "verl-fuse ab ppo-cpu trainer.total_training_steps=12 fuse.interstage.enabled=true",
        "verl-fuse ab grpo-cpu fuse.preset=fast --baseline both",
        "verl-fuse ab ppo-cpu --at-least 1.1 --json",
    )
)
def ab(
    name: Annotated[str, typer.Argument(help="Name of the recipe (verl-fuse recipes).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as verl takes them.")] = None,
    baseline: Annotated[
        Baseline,
        typer.Option(help="What to compare with: stock verl, observe mode, or both, which tells what is polling."),
    ] = "stock",
    warm_up: WarmUp = 1,
    as_json: Json = False,
    html: Html = None,
    wanted: AtLeast = None,
) -> None:
    """Run a recipe as stock verl, then with verl-fuse, and compare the two runs.

    Overrides of `fuse` go to the fused run alone, all others to all runs. The runs' folders are NAME-ab-stock,
    NAME-ab-observe and NAME-ab-fused; with --json, the output of the runs goes to stderr. Stock verl looks at its
    rollout every 2 s, observe mode and a fused run by default more often: --baseline both makes three runs, and tells
    the gain over each and the part that observe mode has alone; tables, page and --at-least compare with stock.
    """
    recipe = find_recipe(name)
    require_version()
    require_on("no run would be one with verl-fuse")
    launches = plan_runs(recipe, overrides or [], home_from(os.environ), baseline)
    check_options(html, wanted)
    steps = select(launches["fused"].config, "trainer.total_training_steps")
    if steps is not None and warm_up >= steps:
        raise FuseError(f"--warm-up {warm_up}: leaves no step of the {steps} of trainer.total_training_steps")
    for number, launch in enumerate(launches.values(), start=1):
        note(f"run {number} of {len(launches)}: {launch.run_dir.name}")
        with stdout_to_stderr() if as_json else nullcontext():
            code = execute(launch)
        if code:
            raise typer.Exit(code)
    base, *between, fused = (launch.run_dir for launch in launches.values())
    raise typer.Exit(judge(base, fused, warm_up, as_json, html, wanted, *between))


def plan_runs(
    recipe: Recipe, overrides: Sequence[str], home: Path, baseline: Baseline = "stock"
) -> dict[str, PlannedRun]:
    """Return the runs by name, each in a folder of its own, the fused one last; overrides of `fuse` and of the
    trainer's mode go to the fused run alone.

    All start from the beginning, whatever an earlier comparison left there. A FuseError lists every problem of any run.
    """
    both = [override for override in overrides if not _FUSED_ONLY.match(override)]
    # Observe mode looks at the rollout as often as the fused run.
    looks = [override for override in overrides if key_of(override) == "fuse.poll_interval"]
    arms = {"stock": both, "observe": [*both, *OBSERVE, *looks], "fused": list(overrides)}
    if baseline != "both":
        del arms["observe" if baseline == "stock" else "stock"]
    planned: dict[str, PlannedRun] = {}
    problems: list[str] = []
    for name, chosen in arms.items():
        own = [f"trainer.experiment_name={recipe.name}-ab-{name}", "trainer.resume_mode=disable"]
        try:
            planned[name] = plan(recipe, [*own, *chosen], baseline=name == "stock", home=home)
        except FuseError as error:
            problems.extend(map(str, error.args))
    for launch in planned.values():
        loggers = select(launch.config, "trainer.logger")
        if _COMPARED not in ([loggers] if isinstance(loggers, str) else loggers or ()):
            needs = f"needs {_COMPARED} among them: `ab` compares the runs' {METRICS_FILE}"
            problems.append(str(Refusal("trainer.logger", loggers, needs)))
    if problems:
        raise FuseError(*dict.fromkeys(problems))
    folders = {launch.run_dir for launch in planned.values()}
    if len(folders) < len(planned):
        raise FuseError(
            f"trainer.default_local_dir={folders.pop()}: `ab` makes {len(planned)} runs, each in a folder of its own; "
            "leave out trainer.default_local_dir and trainer.experiment_name, and choose the place by VERL_FUSE_HOME"
        )
    return planned


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send the output of the enclosed code and of its child processes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
