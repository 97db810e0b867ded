"""`verl-fuse trace RUN_DIR`: the idle table of a recorded run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_fuse.cli.tables import print_table
from verl_fuse.errors import FuseError
from verl_fuse.timeline.files import INDEX_PAGE, page_of, read_step, recorded_steps
from verl_fuse.timeline.idle import IdleTable, average, idle_table

app = typer.Typer(add_completion=False)

_PLURAL = {
    "device": "devices",
    "replica": "replicas",
    "rank": "ranks",
    "lane": "lanes",
    "step": "driver",
    "other": "others",
}


@app.command()
def trace(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run (fuse.run_dir).")],
    step: Annotated[int | None, typer.Option(help="Step to show; default: the last one.")] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Mean over all recorded steps.")] = False,
) -> None:
    """Print the idle table of a recorded run and name its timeline page."""
    if all_steps and step is not None:
        raise FuseError(f"--step {step} and --all exclude each other")
    steps = recorded_steps(run_dir)
    chosen = steps if all_steps else [steps[-1] if step is None else step]
    timelines = [read_step(run_dir, number) for number in chosen]
    table = average([idle_table(timeline) for timeline in timelines])
    seconds = sum(timeline.end - timeline.start for timeline in timelines) / len(timelines)
    which = f"mean of {len(chosen)} steps ({chosen[0]} to {chosen[-1]})" if len(chosen) > 1 else f"step {chosen[0]}"
    for shown in (
        _tracks(table, f"{escape(timelines[-1].run)}: {which}, {seconds:.2f} s", len(chosen)),
        _roles(table),
        _categories(table, len(chosen)),
    ):
        print_table(shown)
    console = Console()
    if table.overall is not None:
        console.print(f"Devices idle: {table.overall:.1%} of the step")
    page = run_dir / INDEX_PAGE if len(chosen) > 1 else page_of(run_dir, chosen[0])
    if page is not None and page.is_file():
        console.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(
            "Page: none was written (fuse.observe.html=false, or removed by fuse.observe.keep_steps)", soft_wrap=True
        )


def _tracks(table: IdleTable, title: str, steps: int) -> Table:
    shown = Table("track", title=title, title_justify="left")
    for column in ("busy s", "idle", "spans", "at once"):
        shown.add_column(column, justify="right")
    for row in (*table.devices, *table.rows):
        cells = (
            f"{row.busy / steps:.2f}",
            f"{row.idle_fraction:.1%}",
            f"{row.spans / steps:g}",
            f"{row.concurrency:.1f}",
        )
        shown.add_row(escape(row.track), *cells)
    return shown


def _roles(table: IdleTable) -> Table:
    shown = Table("idle by role")
    for column in ("count", "mean", "least", "most"):
        shown.add_column(column, justify="right")
    for kind, plural in _PLURAL.items():
        idle = [row.idle_fraction for row in table.of(kind)]
        mean = table.idle_fraction(kind)
        if idle and mean is not None:
            shown.add_row(plural, str(len(idle)), f"{mean:.1%}", f"{min(idle):.1%}", f"{max(idle):.1%}")
    return shown


def _categories(table: IdleTable, steps: int) -> Table:
    shown = Table("work on replicas and ranks")
    shown.add_column("seconds, summed", justify="right")
    for name, seconds in table.categories:
        shown.add_row(name, f"{seconds / steps:.2f}")
    return shown
