"""`verl-fuse trace RUN_DIR`: prints the idle table of a recorded run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import LANE, RANK, REPLICA, STEP, Timeline
from verl_fuse.timeline.files import INDEX_PAGE, located, page_of, read_step, readable_steps, recorded_steps
from verl_fuse.timeline.idle import IdleTable, average, idle_table

app = typer.Typer(add_completion=False)
EXAMPLES = examples(
    "verl-fuse trace runs/ppo-cpu",
    "verl-fuse trace runs/ppo-cpu/timeline.html --all",
    "verl-fuse trace runs/ppo-cpu --step 3 --json",
)

_PLURAL = {
    "device": "devices",
    REPLICA: "replicas",
    RANK: "ranks",
    LANE: "lanes",
    STEP: "driver",
    "other": "others",
}


@app.command(epilog=EXAMPLES)
def trace(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run (fuse.run_dir), or a page in it.")
    ],
    step: Annotated[int | None, typer.Option(help="Step to show; default: the last one that can be read.")] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Mean over all recorded steps.")] = False,
    as_json: Json = False,
) -> None:
    """Print the idle table of a recorded run and name its timeline page."""
    if all_steps and step is not None:
        raise FuseError(f"--step {step} and --all exclude each other")
    run_dir, of_page = located(run)
    timelines = _timelines(run_dir, of_page if step is None and not all_steps else step, all_steps)
    chosen = [timeline.step for timeline in timelines]
    table = average([idle_table(timeline) for timeline in timelines])
    found = run_dir / INDEX_PAGE if len(chosen) > 1 else page_of(run_dir, chosen[0])
    page = found if found is not None and found.is_file() else None
    if as_json:
        print_json(as_data(table, timelines, page))
    else:
        _show(table, timelines, page)


def _timelines(run_dir: Path, step: int | None, all_steps: bool) -> list[Timeline]:
    if step is not None:
        return [read_step(run_dir, step)]
    steps = recorded_steps(run_dir)
    readable = readable_steps(run_dir, steps if all_steps else reversed(steps))
    return list(readable) if all_steps else [next(readable)]


def as_data(table: IdleTable, timelines: list[Timeline], page: Path | None) -> dict[str, Any]:
    """Return the keys of `--json`; seconds are per step."""
    count = len(timelines)
    tracks = [
        {
            "track": row.track,
            "busy_seconds": row.busy / count,
            "idle_fraction": row.idle_fraction,
            "spans": row.spans / count,
            "concurrency": row.concurrency,
        }
        for row in (*table.devices, *table.rows)
    ]
    return {
        "run": timelines[-1].run,
        "steps": [timeline.step for timeline in timelines],
        "step_seconds": _seconds(timelines),
        "tracks": tracks,
        "work_seconds": {name: seconds / count for name, seconds in table.categories},
        "devices_idle_fraction": table.overall,
        "page": page and str(page),
    }


def _seconds(timelines: list[Timeline]) -> float:
    return sum(timeline.end - timeline.start for timeline in timelines) / len(timelines)


def _show(table: IdleTable, timelines: list[Timeline], page: Path | None) -> None:
    chosen = [timeline.step for timeline in timelines]
    which = f"mean of {len(chosen)} steps ({chosen[0]} to {chosen[-1]})" if len(chosen) > 1 else f"step {chosen[0]}"
    for shown in (
        _tracks(table, f"{escape(timelines[-1].run)}: {which}, {_seconds(timelines):.2f} s", len(chosen)),
        _roles(table),
        _categories(table, len(chosen)),
    ):
        print_table(shown)
    console = Console()
    console.print("spans: pieces of work on a track in a step; at once: how many ran together while it was busy (mean)")
    if table.overall is not None:
        console.print(f"Devices idle: {table.overall:.1%} of the step")
    if page is not None:
        console.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(
            "Page: none was written (fuse.observe.html=false, or removed by fuse.observe.keep_steps)", soft_wrap=True
        )


def _tracks(table: IdleTable, title: str, steps: int) -> Table:
    shown = Table("track", *numbers("busy s", "idle", "spans", "at once"), title=title, title_justify="left")
    for row in (*table.devices, *table.rows):
        shown.add_row(
            escape(row.track),
            f"{row.busy / steps:.2f}",
            f"{row.idle_fraction:.1%}",
            f"{row.spans / steps:.3g}",
            f"{row.concurrency:.1f}",
        )
    return shown


def _roles(table: IdleTable) -> Table:
    shown = Table("idle by role", *numbers("count", "mean", "least", "most"))
    for kind, plural in _PLURAL.items():
        idle = [row.idle_fraction for row in table.of(kind)]
        mean = table.idle_fraction(kind)
        if idle and mean is not None:
            shown.add_row(plural, str(len(idle)), f"{mean:.1%}", f"{min(idle):.1%}", f"{max(idle):.1%}")
    return shown


def _categories(table: IdleTable, steps: int) -> Table:
    shown = Table("work on replicas and ranks", *numbers("seconds, summed"))
    for name, seconds in table.categories:
        shown.add_row(name, f"{seconds / steps:.2f}")
    return shown
