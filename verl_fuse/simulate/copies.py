"""Prices a copy of the actor on the devices of each replica (FSDP2's hybrid sharding), the layout of
`fuse.update.stream`: seconds, bytes, and notes on them.

Invariants (tests/unit/simulate/test_copies.py):
- weights, gradient and two moments are 16 bytes per parameter, sums of gradients that wait 4, over a replica's devices;
- a model that does not fit, or an algorithm that cannot stream, is reported with the number that decides.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.model import Batch
from verl_fuse.errors import FuseError
from verl_fuse.simulate.calls import is_dedicated
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import devices_each, mean_batch, replicas_of
from verl_fuse.simulate.streamed import StreamedTail, StreamedUpdate
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.units import GIB
from verl_fuse.spec.workload import Workload


def update_of(
    workload: Workload, plan: Plan, cost: AnalyticCost, features: frozenset[str], options: SimulationOptions
) -> StreamedUpdate | None:
    """Return the update under these features where it is trained in copies, else None."""
    if "copies" not in features or why_not(workload, plan, cost, options):
        return None
    update = streamed_update(workload, plan, cost, options)
    streams = "stream" in features and not _waits_for_reference(workload, features)
    # A migration and `fuse.elastic.release` exclude each other.
    return replace(update, when_done="interstage" not in features, dedicated=streams and update.dedicated)


def notes_of(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    features: frozenset[str],
    options: SimulationOptions,
    tail: StreamedTail | None,
) -> Iterator[str]:
    """Yield the notes on a step under these features, whose update was `tail`."""
    if "copies" not in features:
        return
    if tail is None:
        yield str(why_not(workload, plan, cost, options))
        return
    yield f"a copy of the actor on each replica: actor_rollout_ref.actor.fsdp_config.fsdp_size={devices_each(plan)}"
    if "stream" in features and _waits_for_reference(workload, features):
        yield "a group is trained on after its reference log-probs: with interstage (stream+interstage)"
    elif "stream" in features:
        yield f"{tail.share:.0%} of the update is done in calls that begin before generation ends"


def _waits_for_reference(workload: Workload, features: frozenset[str]) -> bool:
    return workload.reference is not None and "interstage" not in features


@lru_cache(maxsize=256)
def why_not(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> str | None:
    """Return the reason why the update of this workload is not streamed, or None."""
    if workload.critic is not None:
        return "an advantage needs the whole batch: nothing is streamed with a critic"
    if workload.epochs * workload.minibatches > 1:
        return "several updates a step: nothing is streamed"
    if replicas_of(plan) == 1:
        return "one replica: no device is free before generation ends"
    devices = devices_each(plan)
    if _microbatches(workload, plan, cost, options) is None:
        held = held_bytes(workload.actor, devices, cost)
        return (
            f"{held / GIB:.1f} GiB of parameters, moments and gradients on each device of a replica of {devices}, and "
            f"a sequence's activations, do not fit into {cost.cluster.device.memory / GIB:.1f} GiB: replicas of more "
            "devices would do"
        )
    return None


def held_bytes(model: Model, devices: int, cost: AnalyticCost) -> float:
    """Return the bytes on one of the `devices` of a replica between two calls, activations not counted."""
    memory = cost.memory(model, "train", _copy(devices))
    # Sums that wait are as large as gradients.
    return memory.model + memory.gradients


@lru_cache(maxsize=256)
def streamed_update(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> StreamedUpdate:
    """Return the training in copies, for a workload of which `why_not` returns None; replicas that are done are
    released."""
    microbatches = _microbatches(workload, plan, cost, options)
    if microbatches is None:
        raise FuseError(str(why_not(workload, plan, cost, options)))
    model, devices, replicas = workload.actor, devices_each(plan), replicas_of(plan)
    layout, share = _copy(devices), mean_batch(workload).split(replicas)

    def seconds(batch: Batch) -> float:
        passes = cost.train(model, layout, batch, 1, microbatches, recompute=options.recompute)
        return (1 - workload.zero_gradient) * (passes - cost.update(model, layout))

    squares = (seconds(replace(share, squares=2 * share.squares)) - seconds(share)) / share.squares
    spare = cost.cluster.device.memory * (1 - options.rollout_memory)
    return StreamedUpdate(
        per_token=(seconds(share) - squares * share.squares) / share.tokens,
        per_square=squares,
        end_seconds=cost.update(model, layout) + cost.reduce_copies(model, devices, replicas),
        load_seconds=cost.offload(max(0.0, held_bytes(model, devices, cost) - spare)),
        dedicated=is_dedicated(cost, options),
    )


def _copy(devices: int) -> Layout:
    """Return the layout of one copy: weights, gradients and optimizer states are cut over a replica's devices."""
    return Layout(dp=devices, shards=devices)


def _microbatches(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> int | None:
    """Return the fewest micro-batches of a device's share of the batch that fit beside the held bytes, or None."""
    devices = devices_each(plan)
    share = mean_batch(workload).split(replicas_of(plan) * devices)
    count = 1
    while True:
        part = share.split(count)
        memory = cost.memory(workload.actor, "train", _copy(devices), microbatch=part, recompute=options.recompute)
        if memory.total + memory.gradients <= cost.cluster.device.memory:
            return count
        if part.sequences <= 1:
            return None
        count *= 2
