"""`verl-fuse schedule from-model`: writes the problem of training actor and critic of given sizes in one pipeline, by
the analytic cost model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_fuse.cli.cluster_argument import CLUSTER_HELP, read_cluster
from verl_fuse.cli.output import Json, print_json
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.files import check_writable, save
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.length_files import lengths_from
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_from
from verl_fuse.spec.plan import CallPlan
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.workload import Workload

if TYPE_CHECKING:
    # Numba takes a second to import.
    from verl_fuse.cost.analytic import AnalyticCost

_MODEL = "Size name, or path of a config.json or its folder."


def from_model(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help=CLUSTER_HELP)],
    actor: Annotated[str, typer.Option(help=_MODEL)],
    critic: Annotated[str, typer.Option(help=_MODEL)],
    actor_layout: Annotated[str, typer.Option(help='Such as "tp8 pp4".')],
    critic_layout: Annotated[str, typer.Option(help='Of as many devices, such as "tp8 pp2 dp2".')],
    out: Annotated[Path, typer.Option(help="Where the problem goes (JSON); seconds and bytes.")],
    sequences: Annotated[int, typer.Option(min=1, help="Of one mini-batch, over all data-parallel ranks.")] = 64,
    microbatches: Annotated[int, typer.Option(min=1, help="Of the actor per mini-batch and data-parallel rank.")] = 16,
    prompt: Annotated[str, typer.Option(help="Prompt lengths, as in a workload file.")] = "fixed:256",
    response: Annotated[str, typer.Option(help="Response lengths, as in a workload file.")] = "fixed:1024",
    recompute: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    as_json: Json = False,
) -> None:
    """Write the schedule problem of an actor and a critic; the critic's micro-batches are as large as the actor's."""
    from verl_fuse.cost.analytic import AnalyticCost

    check_writable(out)
    workload = Workload(
        "ppo",
        prompts=sequences,
        samples=1,
        prompt=lengths_from(prompt),
        response=lengths_from(response),
        actor=model_from(actor),
        critic=model_from(critic).as_value_model(),
    )
    cost = AnalyticCost(read_cluster(cluster))
    layouts = Layout.parse(actor_layout), Layout.parse(critic_layout)
    first = _call("actor_train", workload.actor, layouts[0], microbatches, cost)
    count = max(1, microbatches * layouts[0].dp // layouts[1].dp)
    second = _call("critic_train", workload.model("critic"), layouts[1], count, cost)
    problem = problem_of(workload, first, second, cost, recompute)
    save(out, problem.to_json() + "\n")
    if as_json:
        print_json({"ops": problem.ops, "ranks": problem.ranks, "file": str(out)})
    else:
        typer.echo(f"{problem.ops} ops on {problem.ranks} ranks: {out}")


def problem_of(
    workload: Workload, actor: CallPlan, critic: CallPlan, cost: "AnalyticCost", recompute: bool
) -> ScheduleProblem:
    """Return the problem; its memory limit is the part of a device's memory that both models leave."""
    from verl_fuse.simulate.options import SimulationOptions
    from verl_fuse.simulate.pipeline import activation_room, fused_problem, unfusable

    if actor.layout.devices != critic.layout.devices:
        raise FuseError(
            f"actor {actor.layout} has {actor.layout.devices} devices, critic {critic.layout} {critic.layout.devices}; "
            "needs equal numbers"
        )
    reason = unfusable(actor, critic)
    if reason:
        raise FuseError(reason)
    options, device = SimulationOptions(recompute=recompute), cost.cluster.device
    problem = fused_problem(workload, actor, critic, cost, options)
    room, least = activation_room(workload, actor, critic, cost, options), problem.least_memory_limit
    if room < least:
        raise FuseError(
            f"{device.name} has {device.memory / 2**30:.1f} GiB; both models and one micro-batch need "
            f"{(device.memory - room + least) / 2**30:.1f} "
            "GiB. Smaller micro-batches, recomputation, or more tp or pp would do"
        )
    return dataclasses.replace(problem, memory_limit=room)


def _call(name: str, model: Model, layout: Layout, microbatches: int, cost: "AnalyticCost") -> CallPlan:
    layout.check(model)
    if layout.devices > cost.cluster.devices:
        raise FuseError(f"{name}: layout {layout} needs {layout.devices} devices; there are {cost.cluster.devices}")
    return CallPlan(name, Mesh(0, layout.devices), layout, microbatches)
