"""`verl-fuse ab NAME`: runs a recipe as stock verl, then with verl-fuse, and compares the two runs."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from verl_fuse.cli.compare import AtLeast, Html, WarmUp, check_options, judge
from verl_fuse.cli.composition import select
from verl_fuse.cli.output import Json, examples
from verl_fuse.cli.recipes import Recipe, find_recipe
from verl_fuse.cli.report import METRICS_FILE
from verl_fuse.cli.run import PlannedRun, execute, home_from, plan, say
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.switch import require_on
from verl_fuse.spec.step import Refusal

app = typer.Typer(add_completion=False)

# Overrides that stock verl has no key for, or that switch verl-fuse on.
_FUSED_ONLY = re.compile(r"[+~]*(fuse\b|trainer\.v1\.trainer_mode\b)")
# verl's name of the logger that writes the metrics.
_COMPARED = "file"


@app.command(
    epilog=examples(
        "verl-fuse ab ppo-cpu trainer.total_training_steps=12 fuse.interstage.enabled=true",
        "verl-fuse ab ppo-cpu --at-least 1.1 --json",
    )
)
def ab(
    name: Annotated[str, typer.Argument(help="Name of the recipe (verl-fuse recipes).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as verl takes them.")] = None,
    warm_up: WarmUp = 1,
    as_json: Json = False,
    html: Html = None,
    wanted: AtLeast = None,
) -> None:
    """Run a recipe as stock verl, then with verl-fuse, and compare the two runs.

    Overrides of `fuse` go to the fused run alone, all others to both. The runs' folders are NAME-ab-stock and
    NAME-ab-fused; with --json, the output of the runs goes to stderr.
    """
    recipe = find_recipe(name)
    require_version()
    require_on("both runs would be stock verl")
    launches = plan_both(recipe, overrides or [], home_from(os.environ))
    check_options(html, wanted)
    steps = select(launches[0].config, "trainer.total_training_steps")
    if steps is not None and warm_up >= steps:
        raise FuseError(f"--warm-up {warm_up}: leaves no step of the {steps} of trainer.total_training_steps")
    for number, launch in enumerate(launches, start=1):
        say(f"run {number} of 2: {launch.run_dir.name}")
        with stdout_to_stderr() if as_json else nullcontext():
            code = execute(launch)
        if code:
            raise typer.Exit(code)
    stock, fused = (launch.run_dir for launch in launches)
    raise typer.Exit(judge(stock, fused, warm_up, as_json, html, wanted))


def plan_both(recipe: Recipe, overrides: Sequence[str], home: Path) -> tuple[PlannedRun, PlannedRun]:
    """Return the stock run and the fused one, each in a folder of its own; overrides of `fuse` and of the trainer's
    mode go to the fused run alone.

    Both start from the beginning, whatever an earlier comparison left there. A FuseError lists every problem of either
    run.
    """
    both = [override for override in overrides if not _FUSED_ONLY.match(override)]

    def named(which: str) -> list[str]:
        return [f"trainer.experiment_name={recipe.name}-ab-{which}", "trainer.resume_mode=disable"]

    problems: list[str] = []

    def planned(chosen: list[str], *, baseline: bool) -> PlannedRun | None:
        try:
            return plan(recipe, chosen, baseline=baseline, home=home)
        except FuseError as error:
            problems.extend(map(str, error.args))
            return None

    stock = planned([*named("stock"), *both], baseline=True)
    fused = planned([*named("fused"), *overrides], baseline=False)
    for launch in (stock, fused):
        loggers = select(launch.config, "trainer.logger") if launch else _COMPARED
        if _COMPARED not in ([loggers] if isinstance(loggers, str) else loggers or ()):
            needs = f"needs {_COMPARED} among them: `ab` compares the runs' {METRICS_FILE}"
            problems.append(str(Refusal("trainer.logger", loggers, needs)))
    if stock is None or fused is None or problems:
        raise FuseError(*dict.fromkeys(problems))
    if stock.run_dir == fused.run_dir:
        raise FuseError(
            f"trainer.default_local_dir={stock.run_dir}: `ab` makes two runs, each in a folder of its own; leave out "
            "trainer.default_local_dir "
            "and trainer.experiment_name, and choose the place by VERL_FUSE_HOME"
        )
    return stock, fused


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
