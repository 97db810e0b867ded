"""`verl-fuse schedule`: solves, shows and compares fused pipeline schedules. Needs neither torch nor verl."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from verl_fuse.cli import interrupt
from verl_fuse.cli.output import Json, begun, examples, finite, note, print_json
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.schedule_from_model import from_model
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import INSTALL, METHODS, has_solver, possible_methods, solve
from verl_fuse.schedule.render import write_picture
from verl_fuse.schedule.render.curve import summary
from verl_fuse.schedule.render.text import text_page
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.files import check_writable
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule
from verl_fuse.spec.units import in_memory, in_time

FROM_MODEL = (
    "verl-fuse schedule from-model h100x4 --actor llama-13b --critic llama-7b "
    '--actor-layout "tp8 pp4" --critic-layout "tp8 pp2 dp2" --out problem.json'
)
SOLVE = "verl-fuse schedule solve problem.json --time-limit 30 --out schedule.json"
SHOW = "verl-fuse schedule show schedule.json --out schedule.html"
COMPARE = "verl-fuse schedule compare problem.json --time-limit 60"
app = typer.Typer(
    help="Fused pipeline schedules: solve, show, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=examples(FROM_MODEL, SOLVE, SHOW, COMPARE),
)

app.command(epilog=examples(FROM_MODEL))(from_model)

ProblemFile = Annotated[
    Path, typer.Argument(metavar="PROBLEM.json", help="The problem: pipelines of micro-batches on ranks (from-model).")
]
TimeLimit = Annotated[
    float,
    typer.Option(
        min=0.1, max=1e6, callback=finite, help="Seconds for the whole command; the best found by then is returned."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Solver threads.")]
LEAST_TIME_LIMIT = 0.1


@app.command(name="solve", epilog=examples(SOLVE))
def solve_command(
    context: typer.Context,
    problem_file: ProblemFile,
    out: Annotated[
        Path | None, typer.Option(help="Where the schedule goes (JSON); without it only the summary is printed.")
    ] = None,
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(METHODS))] = "portfolio",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Solve a problem; Ctrl-C returns the best schedule so far."""
    until = begun(context) + time_limit
    problem = ScheduleProblem.read(problem_file)
    if out is not None:
        check_writable(out)
    if method == "portfolio" and not has_solver():
        note(f"annealing alone: {INSTALL} adds a search that proves optima")
    with ProgressNotes(f"{method}: {problem.ops} ops on {problem.ranks} ranks") as report:
        schedule = solve(problem, method, Budget(_left(until), seed, workers, report))
    if out is not None:
        schedule.write(out)
    if as_json:
        print_json({**as_data(schedule), "file": out and str(out)})
    else:
        typer.echo(summary(schedule))


@app.command(epilog=examples(SHOW))
def show(
    schedule_file: Annotated[Path, typer.Argument(metavar="SCHEDULE.json")],
    out: Annotated[
        Path | None, typer.Option(help=".html, .svg, .png or .txt; without it the text form is printed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a schedule and draw it: ops, memory per rank, bubbles, bound."""
    if out is not None:
        check_writable(out)
    schedule = Schedule.read(schedule_file)
    try:
        validate(schedule)
    except FuseError as error:
        raise FuseError(f"{schedule_file}: {error}") from error
    if out is not None:
        write_picture(schedule, out)
    elif not as_json:
        typer.echo(text_page(schedule))
    if as_json:
        print_json({**as_data(schedule), "file": out and str(out)})


@app.command(epilog=examples(COMPARE))
def compare(
    context: typer.Context,
    problem_file: ProblemFile,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Run every method and print a table; methods share the time limit. Ctrl-C prints what was found so far."""
    until = begun(context) + time_limit
    problem, found, interrupted = ScheduleProblem.read(problem_file), [], False
    with ProgressNotes(f"{problem.ops} ops on {problem.ranks} ranks") as report:
        methods = possible_methods()
        for left, method in zip(range(len(methods), 0, -1), methods, strict=True):
            report(method)
            budget = Budget(_left(until) / left, seed, workers, lambda text, method=method: report(f"{method}: {text}"))
            try:
                found.append(solve(problem, method, budget))
            except KeyboardInterrupt:
                interrupted = True
            if interrupted := interrupted or budget.stopped.is_set():
                break
    if as_json:
        print_json({"methods": [as_data(schedule) for schedule in found]})
    elif found:
        print_table(_comparison(problem, found))
    if interrupted:
        raise typer.Exit(interrupt.CODE)


def _comparison(problem: ScheduleProblem, found: list[Schedule]) -> Table:
    table = Table("method", *numbers("makespan", "bound", "bubbles", "peak memory", "memory bound", "seconds"))
    for schedule in found:
        table.add_row(
            schedule.method,
            *(in_time(seconds, problem.time_unit) for seconds in (schedule.makespan, schedule.lower_bound)),
            f"{schedule.bubble:.1%}",
            *(in_memory(held, problem.memory_unit) for held in (schedule.peak_memory, schedule.memory_lower_bound)),
            f"{schedule.solve_seconds:.1f}",
        )
    return table


def as_data(schedule: Schedule) -> dict[str, Any]:
    """Return the keys of `--json`: times and memory in the problem's units, which are empty where the problem names
    none."""
    return {
        "method": schedule.method,
        "makespan": schedule.makespan,
        "lower_bound": schedule.lower_bound,
        "optimal": schedule.optimal,
        "time_unit": schedule.problem.time_unit,
        "bubble_fraction": schedule.bubble,
        "peak_memory": schedule.peak_memory,
        "memory_lower_bound": schedule.memory_lower_bound,
        "memory_optimal": schedule.memory_optimal,
        "memory_unit": schedule.problem.memory_unit,
        "solve_seconds": schedule.solve_seconds,
    }


def _left(until: float) -> float:
    """Return the seconds left for the whole command, never none, so that every method returns a schedule."""
    return max(LEAST_TIME_LIMIT, until - time.monotonic())
