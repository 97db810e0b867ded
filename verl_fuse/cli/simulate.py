"""`verl-fuse simulate`: what a step would take, stock and with each feature. Needs neither torch nor verl nor a device."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_fuse.cli.cluster_argument import HELP, read_cluster
from verl_fuse.cli.tables import print_table
from verl_fuse.cost.analytic import Analytic
from verl_fuse.cost.model import CostModel
from verl_fuse.cost.profiled import Profiled
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.simulate.compare import Estimate, Row, compare
from verl_fuse.simulate.options import STRATEGIES, Options
from verl_fuse.simulate.recorded import Replay, read_recorded, replay
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.workload import Workload
from verl_fuse.timeline.files import page_of, read_step, record_step, recorded_steps

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    workload_file: Annotated[Path | None, typer.Argument(metavar="WORKLOAD.yaml", help="The step.")] = None,
    cluster: Annotated[str | None, typer.Argument(metavar="CLUSTER", help=HELP)] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan for the strategies realloc and all.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="One or more of " + ", ".join(STRATEGIES) + "; default: all, realloc only with --plan."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Steps to simulate, each with lengths of its own.")] = 8,
    timeline: Annotated[Path | None, typer.Option(help="Folder for a timeline page of every strategy.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile written by `verl-fuse profile`.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of verl_fuse/simulate/options.py.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A recorded run: what would each feature have saved?")
    ] = None,
) -> None:
    """Compare stock verl with every feature, from lengths and costs alone, or on a run already made."""
    options = read_options(set_ or [])
    if from_ is not None:
        if workload_file or cluster or plan or profile or timeline or strategy:
            raise FuseError("--from RUN_DIR takes everything from the run; only --set goes with it")
        show_replay(from_, options)
        return
    if workload_file is None or cluster is None:
        raise FuseError("needs WORKLOAD.yaml and CLUSTER, or --from RUN_DIR")
    workload, machines = Workload.read(workload_file), read_cluster(cluster)
    rows = compare(
        workload,
        cost_model(machines, profile),
        strategy,
        seeds,
        Plan.read(plan) if plan else None,
        options,
    )
    show(rows, workload, machines, seeds)
    if timeline is not None:
        write_timelines(timeline, rows)


def read_options(settings: list[str]) -> Options:
    """From KEY=VALUE pairs, values as YAML."""
    data = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise FuseError(f"--set {setting!r}: needs KEY=VALUE")
        try:
            data[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise FuseError(f"--set {setting!r}: the value is not YAML") from error
    return read_block(Options, data, "options")


def cost_model(cluster: Cluster, profile: Path | None) -> CostModel:
    """Analytic, or measured where a profile has numbers."""
    return Analytic(cluster) if profile is None else Profiled.of(ProfileTable.read(profile), cluster)


def show(rows: list[Row], workload: Workload, cluster: Cluster, seeds: int) -> None:
    """The table, and what the features decided."""
    console = Console()
    title = (
        f"{workload.algorithm} of {workload.actor.name}, {workload.sequences} samples, on {cluster.devices} x {cluster.device.name}; "
        f"{seeds} steps each, 95 % intervals"
    )
    table = Table("strategy", title=title, title_justify="left")
    for column in ("step s", "gen + inf s", "train s", "speed-up", "idle", "device hours", "cost", "cost / stock"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.strategy,
            _interval(row.seconds, 2),
            f"{row.generation_and_inference:.2f}",
            f"{row.training:.2f}",
            _interval(row.speedup, 3),
            f"{row.idle:.0%}",
            f"{row.device_hours:.3g}",
            f"{row.cost.mean:.3g}",
            _interval(row.cost_ratio, 3),
        )
    print_table(table)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.strategy}: {note}", markup=False, highlight=False, soft_wrap=True)
    for call in rows[0].example.plan.calls:
        console.print(
            f"stock places {call.call} as {call.layout} with {call.microbatches} micro-batches",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _interval(value: Estimate, digits: int) -> str:
    if value.low == value.high:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def write_timelines(folder: Path, rows: list[Row]) -> None:
    """One run folder per strategy, as a recorded run has."""
    console = Console()
    for row in rows:
        run = folder / row.strategy
        try:
            record_step(run, row.example.spans)
        except OSError as error:
            raise FuseError(f"{run}: cannot be written: {error}") from error
        console.print(f"Page: {page_of(run, 1)}", markup=False, highlight=False, soft_wrap=True)


def show_replay(run_dir: Path, options: Options) -> None:
    """The savings table of a recorded run; the first step, which warms up, is left out where there are others."""
    numbers = recorded_steps(run_dir)
    timelines = [read_step(run_dir, number) for number in (numbers[1:] or numbers)]
    result = replay([read_recorded(timeline) for timeline in timelines], options)
    console = Console()
    print_table(_savings(result, f"{escape(timelines[-1].run)}: {result.steps} steps, {result.seconds:.2f} s each"))
    console.print(
        f"Generation replayed from fitted decode times: median error {result.replay_error:.0%}.", highlight=False
    )
    if options.dedicated is None:
        console.print(
            "Replicas are taken to have devices of their own; where they share saturated ones, as on a CPU, say --set dedicated=false.",
            soft_wrap=True,
            highlight=False,
        )


def _savings(result: Replay, title: str) -> Table:
    table = Table("feature", title=title, title_justify="left")
    for column in ("s a step", "of the step", "device time"):
        table.add_column(column, justify="right")
    table.add_column("how")
    for saving in result.savings:
        share = saving.seconds / result.seconds
        device = f"-{saving.device_share:.0%}" if saving.device_share else ""
        table.add_row(saving.feature, f"{saving.seconds:.2f}", f"{share:.1%}", device, escape(saving.note))
    return table
