"""Defines `verl-fuse compare BASE FUSED`: the gain of a fused run over its baseline."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.cli.comparison_tables import show
from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.report import LOGGER, read_metrics
from verl_fuse.compare.comparison import Comparison
from verl_fuse.compare.comparison import compare as compared
from verl_fuse.compare.page import page
from verl_fuse.compare.run import METRICS_FILE, METRICS_PATH_VARIABLE, RunMetrics
from verl_fuse.compare.verdict import at_least, notes, verdict
from verl_fuse.errors import FuseError
from verl_fuse.spec.files import check_writable, save
from verl_fuse.spec.run_config import differences, find_config
from verl_fuse.timeline.files import INDEX_PAGE, located

app = typer.Typer(add_completion=False)

# A note names at most this many keys in which two runs differ.
NAMED = 6

WarmUp = Annotated[
    int, typer.Option("--warm-up", min=0, help="Steps at the start of each run whose times are left out.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page that opens without a network.")]
AtLeast = Annotated[
    float | None,
    typer.Option(
        "--at-least",
        min=0.0,
        help="Exit with 1 unless fused steps are shown to be so many times as fast: the lower end of the 95 % "
        "interval counts.",
    ),
]


@app.command(
    epilog=examples(
        "verl-fuse compare runs/ppo-cpu-baseline runs/ppo-cpu",
        "verl-fuse compare runs/ppo-cpu-baseline runs/ppo-cpu --at-least 1.1 --html compare.html",
    )
)
def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the baseline, as a rule of stock verl.")],
    fused: Annotated[Path, typer.Argument(metavar="FUSED", help="Directory of the run with verl-fuse.")],
    warm_up: WarmUp = 1,
    as_json: Json = False,
    html: Html = None,
    wanted: AtLeast = None,
) -> None:
    """Compare two runs: step seconds with a 95 % interval, stages, rewards and KL, and a verdict.

    Step N of one run is compared with step N of the other, which trains on the same prompts. The interval knows the
    noise within the two runs, not a machine that was slower during one of them: make the runs twice where that can be.
    """
    check_options(html, wanted)
    raise typer.Exit(judge(base, fused, warm_up, as_json, html, wanted))


def check_options(html: Path | None, wanted: float | None) -> None:
    """Refuse options that cannot be served, before anything is read or run."""
    if wanted is not None and not math.isfinite(wanted):
        raise FuseError(f"--at-least {wanted}: needs a finite number, such as 1.1")
    if html is not None:
        check_writable(html)


def judge(
    base: Path,
    fused: Path,
    warm_up: int,
    as_json: bool,
    html: Path | None,
    wanted: float | None,
    observe: Path | None = None,
) -> int:
    """Compare, print and write the page; return the exit code: 1 where `wanted` is not met.

    With a run in observe mode as well, `base` is stock verl, and the part of the gain that is polling is told.
    """
    found = compared(read_run(base), read_run(fused), warm_up)
    measured: dict[str, Any] = {}
    if observe is None:
        remarks = [*notes(found)]
    else:
        over = compared(read_run(observe), read_run(fused), warm_up)
        polling = compared(read_run(observe), read_run(base), warm_up).whole.difference
        arms = {"stock": found.base.seconds, "observe": over.base.seconds, "fused": found.fused.seconds}
        measured["arms"] = {name: dataclasses.asdict(seconds) for name, seconds in arms.items()}
        measured["polling"] = dataclasses.asdict(polling)
        remarks = [*notes(found, polling), f"Beside observe mode {verdict(over)}."]
    remarks += _other_differences(located(base)[0], located(fused)[0])
    met, sentence = (True, None) if wanted is None else at_least(found, wanted)
    if html is not None:
        save(html, page(found, remarks, timelines(html, base=base, fused=fused)))
    if as_json:
        print_json(as_dict(found, remarks, wanted, met) | measured)
    else:
        show(found, remarks, sentence, html)
    return int(not met)


def timelines(html: Path, **runs: Path) -> dict[str, str]:
    """Return the addresses of the runs' timelines, seen from the page `html`, of the runs that have one."""
    pages = {name: located(run)[0] / INDEX_PAGE for name, run in runs.items()}
    return {
        name: quote(Path(os.path.relpath(page.absolute(), html.absolute().parent)).as_posix())
        for name, page in pages.items()
        if page.is_file()
    }


def read_run(run_dir: Path) -> RunMetrics:
    """Return the metrics of a run folder; a FuseError names in one line the missing data."""
    run_dir, _ = located(run_dir)
    if not run_dir.is_dir():
        raise FuseError(f"{run_dir}: no such directory; needs the directory of a run (trainer.default_local_dir)")
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise FuseError(
            f"{run_dir}: no {METRICS_FILE}; it is written by `verl-fuse run`, or by verl with "
            f"{LOGGER} and {METRICS_PATH_VARIABLE}={path}"
        )
    return RunMetrics.of(str(run_dir), read_metrics(path), _samples_per_step(run_dir))


def as_dict(found: Comparison, remarks: list[str], wanted: float | None, met: bool) -> dict[str, Any]:
    """Return everything for JSON: the fields of `Comparison`, in seconds where a name has no other unit; intervals as
    value, low, high."""
    return {
        "verdict": verdict(found),
        "speedup": dataclasses.asdict(found.speedup),
        "at_least": None if wanted is None else {"wanted": wanted, "bound": "speedup.low", "met": met},
        "notes": remarks,
        **dataclasses.asdict(found),
    }


def _samples_per_step(run_dir: Path) -> int | None:
    config = find_config(run_dir)
    if config is None:
        return None
    try:
        sizes = [OmegaConf.select(config, key) for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n")]
    except OmegaConfBaseException:
        # An interpolation has lost its target: the number is not known.
        return None
    return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None


def _other_differences(base: Path, fused: Path) -> list[str]:
    found: Mapping[str, tuple[Any, Any]] = differences(base, fused)
    if not found:
        return []
    named = ", ".join(f"{key}={one!r} and {other!r}" for key, (one, other) in list(found.items())[:NAMED])
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return [f"The runs differ in more than verl-fuse: {named}{more}."]
