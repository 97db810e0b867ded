"""Defines `verl-fuse plan`: it finds devices, layout and micro-batches of each model call. Needs neither torch nor verl
nor a device."""

import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from verl_fuse.cli.cluster_argument import CLUSTER_HELP, price_of, read_cluster
from verl_fuse.cli.output import Json, begun, examples, finite, note, print_json
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError
from verl_fuse.plan.executable import DEMANDS
from verl_fuse.plan.finished_plan import PlanRequest, PlanResult, checked, make_plan
from verl_fuse.plan.overrides import command_line, feature_overrides, path_overrides, workload_overrides
from verl_fuse.plan.search import compile_kernels
from verl_fuse.simulate.copies import held_bytes, why_not
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import devices_each
from verl_fuse.spec.files import check_writable
from verl_fuse.spec.plan import STRATEGIES, Strategy
from verl_fuse.spec.units import GIB
from verl_fuse.spec.workload import Workload

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EXAMPLES = examples(
    "verl-fuse plan step.yaml h100x4",
    "verl-fuse plan step.yaml h100x4 --feature interstage --verl",
    "verl-fuse plan step.yaml cluster.yaml --weight 0 --out plan.json",
)
COMPILING = "preparing compiled kernels; the first time on a machine they are compiled, which takes a minute or two"


@app.command(epilog=EXAMPLES)
def plan(
    context: typer.Context,
    workload_file: Annotated[Path, typer.Argument(metavar="WORKLOAD.yaml", help="The step to plan for.")],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help=CLUSTER_HELP)],
    strategy: Annotated[
        str | None, typer.Option(help="verl's training engine: " + " or ".join(STRATEGIES) + "; default: the faster.")
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal/--executable", help="Any mesh and layout per call, or what verl can run today.")
    ] = False,
    feature: Annotated[
        list[str] | None, typer.Option(help=f"A feature to plan for: {', '.join(DEMANDS)}; repeatable.")
    ] = None,
    weight: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="1: least time, 0: least money; between: fewer nodes may do."
        ),
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Where the plan goes (JSON), for fuse.plan.")] = None,
    verl: Annotated[
        bool,
        typer.Option("--verl", help="Print the overrides for verl, with placeholders for paths, and nothing else."),
    ] = False,
    time_limit: Annotated[
        float,
        typer.Option(
            min=0.5,
            max=1e6,
            callback=finite,
            help="Seconds for the whole command; the best plan found by then is printed.",
        ),
    ] = 10.0,
    profile: Annotated[Path | None, typer.Option(help="A profile written by `verl-fuse profile`.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan, and how far it can be from the best one; Ctrl-C prints the best so far."""
    since = begun(context)
    if strategy is not None and strategy not in STRATEGIES:
        raise FuseError(f"--strategy {strategy}: allowed: {', '.join(STRATEGIES)}")
    if ideal and (verl or strategy):
        raise FuseError(
            "--ideal plans need reallocation between layouts, which no engine of verl has: drop --verl and --strategy"
        )
    if verl and as_json:
        raise FuseError("--verl and --json exclude each other: --json has the overrides too")
    for name in feature or []:
        if name not in DEMANDS:
            raise FuseError(f"--feature {name}: allowed: {', '.join(DEMANDS)}; plans count on no other")
    strategies: tuple[Strategy, ...] = () if ideal else tuple(s for s in STRATEGIES if strategy in (None, s))
    workload = Workload.read(workload_file)
    machines = read_cluster(cluster)
    cost = cost_model(machines, profile)
    if out is not None:
        check_writable(out)
    request = checked(workload, cost, PlanRequest(strategies, tuple(feature or ()), weight, time_limit))
    with ProgressNotes(COMPILING) as report:
        compile_kernels()
        left = time_limit - (time.monotonic() - since)
        made = make_plan(workload, cost, dataclasses.replace(request, time_limit=max(left, 0.0)), report)
    if left <= 0:
        compiled = f"kernels were compiled for longer than --time-limit {time_limit:g}"
        note(f"{compiled}; the next plan on this machine finds them")
    if made.search.stopped:
        note("interrupted; this is the best plan so far")
    if out is not None:
        made.plan.write(out)
    overrides = all_overrides(workload, made)
    if verl:
        # Words of a shell: it takes a block in braces apart.
        typer.echo("\n".join(map(shlex.quote, command_line(made.plan.strategy or "", overrides))))
    elif as_json:
        print_json(as_data(made, overrides, out))
    else:
        show(made)
        if (said := stream_of(workload, made, cost)) is not None:
            typer.echo(said)
        if out is not None:
            typer.echo(f"plan: {out}")


def all_overrides(workload: Workload, made: PlanResult) -> dict[str, Any]:
    """Return verl's keys for the models trained, the devices, and the features; no key for an ideal plan, which verl
    cannot run."""
    if made.plan.strategy is None:
        return {}
    return {
        **path_overrides(workload),
        **workload_overrides(workload),
        **made.plan.overrides,
        **feature_overrides(made.plan),
    }


def stream_of(workload: Workload, made: PlanResult, cost: AnalyticCost) -> str | None:
    """Return the needs of `fuse.update.stream` with an FSDP plan of one update a step, and tell whether they fit;
    return None where a stream is out of the question."""
    plan = made.plan
    if plan.strategy != "fsdp" or workload.critic is not None or workload.epochs * workload.minibatches > 1:
        return None
    if reason := why_not(workload, plan, cost, SimulationOptions()):
        return f"fuse.update.stream: {reason}"
    held = held_bytes(workload.actor, devices_each(plan), cost) / GIB
    return f"fuse.update.stream: {held:.1f} GiB per device with a copy on each replica; `verl-fuse simulate` prices it"


def as_data(made: PlanResult, overrides: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Return the keys of `--json`. `plan` is the content of the file of `--out`; seconds and USD are per step;
    `bound_seconds` is null where nothing is proven."""
    found, cluster = made.search, made.search.space.cluster
    return {
        "strategy": made.plan.strategy or "ideal",
        "device": cluster.device.name,
        "devices": cluster.devices,
        "nodes": made.nodes,
        "seconds": found.seconds,
        "bound_seconds": found.bound or None,
        "unsearched": made.unsearched,
        "usd": made.cost_per_step,
        "peak_bytes": dict(zip((call.call for call in made.plan.calls), _peaks(made), strict=True)),
        "options": found.options,
        "search_seconds": found.elapsed,
        "interrupted": found.stopped,
        "overrides": overrides,
        "plan": json.loads(made.plan.to_json()),
        "file": out and str(out),
    }


def _peaks(made: PlanResult) -> list[float]:
    """Return the bytes per device of each call."""
    space = made.search.space
    return [space.configs[space.config[option]].peak for option in made.search.choice]


def show(made: PlanResult) -> None:
    """Print the table, and the sentence under it."""
    table = Table(
        "call", "devices", "layout", *numbers("micro-batches"), "offload", *numbers("seconds", "GiB per device")
    )
    found = made.search
    for call, peak in zip(made.plan.calls, _peaks(made), strict=True):
        table.add_row(
            call.call,
            str(call.mesh),
            str(call.layout),
            str(call.microbatches),
            "yes" if call.offload else "",
            f"{made.plan.predicted[call.call]:.2f}",
            f"{peak / GIB:.1f}",
        )
    print_table(table)
    engine, cluster = made.plan.strategy or "ideal", found.space.cluster
    typer.echo(
        f"{engine}, {cluster.devices} x {cluster.device.name}: {found.seconds:.2f} s per step, "
        f"{made.cost_per_step:.4g} USD per step"
    )
    if found.bound:
        typer.echo(f"by this model no {engine} plan takes less than {found.bound:.2f} s (gap {found.gap:.2%})")
    if made.unsearched:
        typer.echo(f"not looked at: {', '.join(made.unsearched)}; a longer --time-limit may find a better plan")
    typer.echo(price_of(cluster))
    typer.echo(f"searched {found.options} options in {found.elapsed:.1f} s, {found.nodes} nodes of the proof")
    if made.plan.migration_threshold:
        typer.echo(f"migrate once {made.plan.migration_threshold:.1%} of the samples are unfinished")
    elif "interstage" in made.plan.features and made.plan.strategy == "megatron":
        typer.echo("nothing migrates: Megatron's engines have no slices that infer on released devices")
