"""`verl-fuse plan`: which devices, layout and micro-batches each model call should get. Needs neither torch nor verl nor a device."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from verl_fuse.cli.cluster_argument import HELP, read_cluster
from verl_fuse.cli.tables import print_table
from verl_fuse.cost.analytic import Analytic
from verl_fuse.cost.profiled import Profiled
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.plan.executable import STRATEGIES, Strategy
from verl_fuse.plan.make import Made, Request, make
from verl_fuse.plan.overrides import command_line, feature_overrides, workload_overrides
from verl_fuse.spec.files import check_writable
from verl_fuse.spec.plan import FEATURES
from verl_fuse.spec.workload import Workload

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
GIB = 2**30


@app.command()
def plan(
    workload_file: Annotated[Path, typer.Argument(metavar="WORKLOAD.yaml", help="The step to plan for.")],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help=HELP)],
    strategy: Annotated[
        str | None, typer.Option(help="verl's training engine: " + " or ".join(STRATEGIES) + "; default: the faster.")
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal/--executable", help="Any mesh and layout per call, or what verl can run today.")
    ] = False,
    feature: Annotated[
        list[str] | None, typer.Option(help="A feature to plan for: interstage, pipeline; repeatable.")
    ] = None,
    weight: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="1: least time, 0: least money; between: fewer nodes may do.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Where the plan goes (JSON), for fuse.plan.")] = None,
    verl: Annotated[bool, typer.Option("--verl", help="Print the overrides for verl, and nothing else.")] = False,
    time_limit: Annotated[float, typer.Option(min=0.5, help="Seconds of search.")] = 10.0,
    profile: Annotated[Path | None, typer.Option(help="A profile written by `verl-fuse profile`.")] = None,
) -> None:
    """Find the fastest plan, and how far it can be from the best one."""
    if strategy is not None and strategy not in STRATEGIES:
        raise FuseError(f"--strategy {strategy}: allowed: {', '.join(STRATEGIES)}")
    if ideal and (verl or strategy):
        raise FuseError(
            "--ideal plans need reallocation between layouts, which no engine of verl has: drop --verl and --strategy"
        )
    for name in feature or []:
        if name not in ("interstage", "pipeline"):
            raise FuseError(f"--feature {name}: allowed: interstage, pipeline (of {', '.join(FEATURES)})")
    strategies: tuple[Strategy, ...] = () if ideal else tuple(s for s in STRATEGIES if strategy in (None, s))
    workload = Workload.read(workload_file)
    request = Request(strategies, tuple(feature or ()), weight, time_limit)
    machines = read_cluster(cluster)
    cost = Profiled.of(ProfileTable.read(profile), machines) if profile else Analytic(machines)
    if out is not None:
        check_writable(out)
    made = make(workload, cost, request)
    if out is not None:
        made.plan.write(out)
    if verl:
        overrides = {**workload_overrides(workload), **made.plan.overrides, **feature_overrides(made.plan)}
        typer.echo("\n".join(command_line(made.plan.strategy or "", overrides)))
        return
    show(made)
    if out is not None:
        typer.echo(f"plan: {out}")


def show(made: Made) -> None:
    """The table, and the sentence under it."""
    table = Table(
        "call", "devices", "layout", "micro-batches", "offload", "seconds", "GiB in use", title_justify="left"
    )
    found = made.found
    for call, option in zip(made.plan.calls, found.choice, strict=True):
        way = found.space.ways[found.space.way[option]]
        table.add_row(
            call.call,
            str(call.mesh),
            str(call.layout),
            str(call.microbatches),
            "yes" if call.offload else "",
            f"{made.plan.predicted[call.call]:.2f}",
            f"{way.peak / GIB:.1f}",
        )
    print_table(table)
    engine = made.plan.strategy or "ideal"
    typer.echo(
        f"{engine}, {found.space.cluster.devices} x {found.space.cluster.device.name}: {found.seconds:.2f} s per step, "
        f"{made.cost_per_step:.4g} per step; no {engine} plan takes less than {found.bound:.2f} s (gap {found.gap:.2%})"
    )
    typer.echo(f"searched {found.options} options in {found.elapsed:.1f} s, {found.nodes} nodes of the proof")
    if made.plan.migration_threshold:
        typer.echo(f"migrate once {made.plan.migration_threshold:.1%} of the samples are unfinished")
    elif "interstage" in made.plan.features and made.plan.strategy == "megatron":
        typer.echo("nothing migrates: Megatron's engines have no slices that infer on released devices")
