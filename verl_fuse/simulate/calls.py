"""Computes the seconds of the model calls beside generation, and of the same calls on freed replicas."""

from dataclasses import replace
from functools import lru_cache

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.model import Batch
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import mean_batch, replica_count, replica_layout
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.spec.arrays import Ints
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Call, Workload


def call_batch(workload: Workload, call: Call, plan: CallPlan, lengths: Ints, options: SimulationOptions) -> Batch:
    """Return the computation of a call for sequences of these `lengths`, in their order."""
    if not options.padded:
        return Batch.of(lengths)
    parts = plan.layout.dp * plan.microbatches * (workload.minibatches if call.kind == "train" else 1)
    return Batch.padded(lengths, max(1, -(-len(lengths) // parts)))


def infer_seconds(workload: Workload, call: Call, plan: CallPlan, cost: AnalyticCost, batch: Batch) -> float:
    """Return the seconds of one forward call over the batch, and of loading weights from host memory first."""
    model, entropy = workload.model(call.role), with_entropy(call)
    seconds = cost.infer(model, plan.layout, batch, plan.microbatches, entropy=entropy)
    return seconds + _loading(workload, call, plan, cost)


def with_entropy(call: Call) -> bool:
    """Tell whether verl computes the entropy beside this call's log-probs: with the actor's old ones."""
    return call.role == "actor" and call.kind == "infer"


def train_seconds(
    workload: Workload, call: Call, plan: CallPlan, cost: AnalyticCost, batch: Batch, options: SimulationOptions
) -> float:
    """Return the seconds of all epochs of one train call."""
    model = workload.model(call.role)
    once = cost.train(model, plan.layout, batch, workload.minibatches, plan.microbatches, recompute=options.recompute)
    return workload.epochs * once + 2 * _loading(workload, call, plan, cost)


def _loading(workload: Workload, call: Call, plan: CallPlan, cost: AnalyticCost) -> float:
    return cost.offload(cost.memory(workload.model(call.role), call.kind, plan.layout).model) if plan.offload else 0.0


def is_dedicated(cost: AnalyticCost, options: SimulationOptions) -> bool:
    """Tell whether replicas have devices of their own."""
    return not cost.cluster.device.is_cpu if options.dedicated is None else options.dedicated


@lru_cache(maxsize=256)
def freed_inference(
    workload: Workload,
    calls: tuple[Call, ...],
    plan: Plan,
    cost: AnalyticCost,
    options: SimulationOptions,
    micro_group: int,
) -> InferenceWork:
    """Return the inference of `calls`, `micro_group` samples at a time, on replicas that generation has freed: the work
    of stock's calls over the whole batch, and how well a slice does it.

    A slice holds each model in the generation replica's layout. Weights that fit beside the rollout are loaded while it
    generates; the rest waits in host memory until the replica is free.
    """
    if not calls:
        return InferenceWork(0.0)
    generate = plan.call("actor_generate")
    replicas, layout = replica_count(generate.layout), replica_layout(generate.layout)
    batch = mean_batch(workload)
    per_token = per_square = slice_seconds = last_seconds = weights = 0.0
    one = Batch(1, batch.tokens / batch.sequences, batch.squares / batch.sequences)
    group = Batch(micro_group, one.tokens * micro_group, one.squares * micro_group)
    for call in calls:
        model, placed = workload.model(call.role), plan.call(call.name)
        stock = infer_seconds(workload, call, placed, cost, batch)
        longer = infer_seconds(workload, call, placed, cost, replace(batch, squares=2 * batch.squares))
        squares = replicas * (longer - stock) / batch.squares
        per_square += squares
        per_token += (replicas * stock - squares * batch.squares) / batch.tokens
        slice_layout = layout if layout.fault(model) is None else Layout(dp=layout.devices)
        entropy = with_entropy(call)
        slice_seconds += cost.infer(model, slice_layout, group, 1, entropy=entropy)
        last_seconds += cost.infer(model, slice_layout, one, 1, entropy=entropy)
        weights += cost.memory(model, "infer", slice_layout).weights
    group_work = per_token * group.tokens + per_square * group.squares
    return InferenceWork(
        per_token=per_token,
        per_square=per_square,
        slice_factor=slice_seconds / group_work,
        load_seconds=cost.offload(max(0.0, weights - _spare(workload, plan, cost, options))),
        last_seconds=last_seconds,
        headroom=options.headroom,
        dedicated=is_dedicated(cost, options),
    )


def _spare(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> float:
    """Return the bytes of a device that neither the rollout nor training keeps."""
    trains = [(call, plan.call(call.name)) for call in workload.calls if call.kind == "train"]
    kept = sum(
        cost.memory(workload.model(call.role), "train", at.layout, offload=at.offload).static for call, at in trains
    )
    return cost.cluster.device.memory * (1 - options.rollout_memory) - kept


def streaming_factor(
    workload: Workload, calls: tuple[Call, ...], plan: Plan, cost: AnalyticCost, options: SimulationOptions
) -> float:
    """Return the ratio of inference work in micro-groups to the work in one call for the whole batch, both on all
    devices.

    The driver does the work of a call beside its passes while the devices generate: it takes one device's time,
    not that of all.
    """
    batch, grouped, whole = mean_batch(workload), 0.0, 0.0
    for call in calls:
        model, placed = workload.model(call.role), plan.call(call.name)
        layout, mesh = placed.layout, placed.mesh
        groups = max(1, workload.sequences // (-(-options.micro_group // layout.dp) * layout.dp))
        passes = sum(cost.stage_seconds(model, layout, batch.split(groups * layout.dp)))
        beside = cost.infer(model, layout, batch.split(groups), 1) - passes
        grouped += groups * (passes + beside / mesh.size)
        whole += cost.infer(model, layout, batch, placed.microbatches)
    return grouped / whole


@lru_cache(maxsize=256)
def migration_cost(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> MigrationCost:
    """Return the cost of moving the long tail. Transfer goes over the network between nodes, or inside a node where one
    node has all replicas."""
    layout = replica_layout(plan.call("actor_generate").layout)
    if options.migration == "prefill":
        return MigrationCost(options.migration_latency)
    model, cluster = workload.actor, cost.cluster
    bandwidth = cluster.inter_bandwidth if cluster.nodes > 1 else cluster.intra_bandwidth
    # Keys and values in bf16; every device of a replica receives its share at once.
    transfer = 2 * model.kv_values_per_token / (bandwidth * layout.devices)
    length = workload.prompt.mean + workload.response.mean
    if options.migration == "auto" and cost.migrate(model, layout, length) <= transfer * length:
        return MigrationCost(options.migration_latency)
    return MigrationCost(options.migration_latency, transfer)
