"""`verl-fuse schedule`: solve, show and compare fused pipeline schedules. Needs neither torch nor verl."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from verl_fuse.cli.schedule_from_model import from_model
from verl_fuse.cli.tables import print_table
from verl_fuse.errors import FuseError
from verl_fuse.schedule import cache
from verl_fuse.schedule.methods import METHODS, solve
from verl_fuse.schedule.render import write_picture
from verl_fuse.schedule.render.curve import summary
from verl_fuse.schedule.render.text import text_page
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.files import check_writable
from verl_fuse.spec.problem import Problem
from verl_fuse.spec.schedule import Schedule

app = typer.Typer(
    help="Fused pipeline schedules: solve, show, compare.", no_args_is_help=True, pretty_exceptions_enable=False
)

app.command()(from_model)

ProblemFile = Annotated[
    Path, typer.Argument(metavar="PROBLEM.json", help="The problem; see verl_fuse/spec/problem.py.")
]
TimeLimit = Annotated[float, typer.Option(min=0.1, help="Seconds; the best schedule found by then is returned.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Workers = Annotated[int, typer.Option(min=1, help="Solver threads.")]


@app.command(name="solve")
def solve_command(
    problem_file: ProblemFile,
    out: Annotated[
        Path | None, typer.Option(help="Where the schedule goes (JSON); without it only the summary is printed.")
    ] = None,
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(METHODS))] = METHODS[-1],
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    workers: Workers = 2,
    use_cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Reuse a schedule proven optimal, or found with as much time.")
    ] = True,
    cache_folder: Annotated[
        Path | None, typer.Option(help=f"Default: ${cache.ENVIRONMENT}, or the user's cache directory.")
    ] = None,
) -> None:
    """Solve a problem; Ctrl-C returns the best schedule so far."""
    problem = Problem.read(problem_file)
    if out is not None:
        check_writable(out)
    folder = cache_folder or cache.default_folder()
    cached = cache.load(folder, problem, method) if use_cache else None
    if cached is not None and not _settled(cached, time_limit):
        cached = None
    schedule = cached or solve(problem, method, Budget(time_limit, seed, workers, _progress()))
    if out is not None:
        schedule.write(out)
    typer.echo(summary(schedule))
    if use_cache and cached is None:
        cache.store(folder, schedule)


@app.command()
def show(
    schedule_file: Annotated[Path, typer.Argument(metavar="SCHEDULE.json")],
    out: Annotated[
        Path | None, typer.Option(help=".html, .svg, .png or .txt; without it the text form is printed.")
    ] = None,
) -> None:
    """Check a schedule and draw it: ops, memory per rank, bubbles, bound."""
    if out is not None:
        check_writable(out)
    schedule = Schedule.read(schedule_file)
    try:
        validate(schedule)
    except FuseError as error:
        raise FuseError(f"{schedule_file}: {error}") from error
    if out is None:
        typer.echo(text_page(schedule))
    else:
        write_picture(schedule, out)


@app.command()
def compare(problem_file: ProblemFile, time_limit: TimeLimit = 20.0, seed: Seed = 0, workers: Workers = 2) -> None:
    """Run every method and print a table; the time limit holds for each method."""
    problem = Problem.read(problem_file)
    table = Table("method", "makespan", "bound", "bubbles", "peak memory", "memory bound", "seconds")
    for method in METHODS:
        found = solve(problem, method, Budget(time_limit, seed, workers, _progress()))
        numbers = (found.makespan, found.lower_bound)
        table.add_row(
            method,
            *(f"{number:g}" for number in numbers),
            f"{found.bubble:.1%}",
            f"{found.peak_memory:g}",
            f"{found.memory_lower_bound:g}",
            f"{found.solve_seconds:.1f}",
        )
    print_table(table)


def _settled(schedule: Schedule, time_limit: float) -> bool:
    return (schedule.optimal and schedule.memory_optimal) or schedule.solve_seconds >= time_limit * 0.9


def _progress():
    """Progress lines on a terminal; silence in a pipe."""
    if not sys.stderr.isatty():
        return lambda text: None
    begun = time.monotonic()
    return lambda text: typer.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)
