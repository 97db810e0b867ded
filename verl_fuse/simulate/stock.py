"""Finds the placement that a well-tuned stock verl would get: every call on all devices, one after the other, each in
the layout that is fastest for it.

Invariants (tests/unit/simulate/test_stock.py):
- every call has all devices, and fits their memory;
- no layout of a train call that fits is faster than the one chosen, and no rollout of any tensor parallelism;
- where a model fits nowhere, the error says how much memory would suffice.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.simulate.calls import infer_seconds, train_seconds
from verl_fuse.simulate.draw import draw
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import mean_batch, replica_count, replica_timing
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout, shard_sizes
from verl_fuse.spec.model import Model
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Call, CallKind, Workload


@lru_cache(maxsize=64)
def stock_plan(workload: Workload, cost: AnalyticCost, options: SimulationOptions = SimulationOptions()) -> Plan:  # noqa: B008 - frozen
    """Return the plan with the fastest layout per call. As in verl, a trained role does its inference in the layout it
    trains in."""
    plans: dict[str, CallPlan] = {}
    for call in workload.calls:
        if call.kind == "generate":
            plans[call.name] = min(rollouts(workload, cost, options), key=lambda found: found[1])[0]
        elif call.kind == "train":
            plans[call.name] = fastest(workload, call, cost, options)
    for call in workload.calls:
        if call.kind == "infer":
            twin = plans.get(f"{call.role}_train")
            plans[call.name] = as_inference(workload, call, twin) if twin else fastest(workload, call, cost, options)
    return Plan(tuple(plans[call.name] for call in workload.calls))


def as_inference(workload: Workload, call: Call, train: CallPlan) -> CallPlan:
    """Place inference on the devices and in the layout of training; micro-batches of the same size."""
    microbatches = train.microbatches * workload.minibatches
    return CallPlan(call.name, train.mesh, train.layout, microbatches, train.offload)


def layouts(cost: AnalyticCost, model: Model, devices: int, kind: CallKind, engine: str | None) -> Iterator[Layout]:
    """Yield layouts of so many devices that divide the model. Megatron's and the rollout's: tp within a node, pp and dp
    powers of two; experts, uncut, over 1, 2, 4, ... ranks of a stage, in the rollout over none or the tensor ranks.
    FSDP's, for all other calls: shards over all devices, or over 1, 2, 4, ... nodes. `engine`: that trainer's alone."""
    node = cost.cluster.devices_per_node
    if kind != "generate" and engine != "megatron":
        yield from (Layout(dp=devices, shards=shards) for shards in shard_sizes(devices, node))
    if kind != "generate" and engine == "fsdp":
        return
    for tp in (size for size in (1, 2, 4, 8) if node % size == 0):
        pp = 1
        while devices % (tp * pp) == 0 and pp <= model.layers:
            dp = devices // (tp * pp)
            experts = (1, tp) if kind == "generate" else [2**i for i in range((tp * dp).bit_length())]
            for ep in dict.fromkeys(experts) if model.experts else (1,):
                if tp * dp % ep == 0 and (layout := Layout(tp, pp, dp, ep=ep, etp=int(ep > 1))).fault(model) is None:
                    yield layout
            pp *= 2


@lru_cache(maxsize=64)
def compute_options(
    workload: Workload, call: Call, cost: AnalyticCost, options: SimulationOptions, on: Mesh | None = None
) -> list[tuple[CallPlan, float]]:
    """Return every placement of a train or infer call `on` these devices (None: all) that fits their memory, and its
    seconds for a batch of mean lengths."""
    mesh = on or Mesh(0, cost.cluster.devices)
    model, batch, needs, found = workload.model(call.role), mean_batch(workload), [], []
    updates = workload.minibatches if call.kind == "train" else 1
    for layout in layouts(cost, model, mesh.size, call.kind, options.engine):
        sequences = max(1, int(workload.sequences / updates / layout.dp))
        # Powers of two, up to one sequence each.
        for microbatches in (2**power for power in range(sequences.bit_length())):
            part = batch.split(layout.dp * updates * microbatches)
            memory = cost.memory(
                model, call.kind, layout, microbatch=part, microbatches=microbatches, recompute=options.recompute
            )
            needs.append(memory.total)
            if memory.total <= cost.cluster.device.memory:
                plan = CallPlan(call.name, mesh, layout, microbatches)
                if call.kind == "train":
                    found.append((plan, train_seconds(workload, call, plan, cost, batch, options)))
                else:
                    found.append((plan, infer_seconds(workload, call, plan, cost, batch)))
    if not found:
        raise _nowhere(model, call, cost, min(needs, default=float("inf")), mesh.size)
    return found


def fastest(
    workload: Workload, call: Call, cost: AnalyticCost, options: SimulationOptions, on: Mesh | None = None
) -> CallPlan:
    """Return the placement of a train or infer call `on` these devices (None: all) that is fastest for a batch of mean
    lengths."""
    return min(compute_options(workload, call, cost, options, on), key=lambda found: found[1])[0]


@lru_cache(maxsize=64)
def rollouts(workload: Workload, cost: AnalyticCost, options: SimulationOptions) -> list[tuple[CallPlan, float]]:
    """Return every placement of the rollout on all devices that fits, and its seconds for one batch drawn from the
    lengths; replicas are pipelined only where tensor parallelism alone does not make the model fit."""
    (call,) = (call for call in workload.calls if call.kind == "generate")
    lengths = draw(workload, np.random.default_rng(0), options.predictability)
    requests = Requests.of(lengths.prompt, lengths.response)
    longest = workload.prompt.maximum + workload.response.maximum
    needs, found = [], []
    every = list(layouts(cost, workload.actor, cost.cluster.devices, call.kind, options.engine))
    possible = [layout for layout in every if options.rollout_tp in (None, layout.tp)]
    if not possible:
        widths = ", ".join(map(str, sorted({layout.tp for layout in every})))
        raise FuseError(f"options.rollout_tp={options.rollout_tp}: needs one that divides model and node: {widths}")
    for layout in sorted(possible, key=lambda layout: layout.pp):
        if found and layout.pp > 1:
            break
        plan = CallPlan(call.name, Mesh(0, layout.devices), layout)
        memory = cost.memory(workload.actor, "generate", replace(layout, dp=1), kv_tokens=longest)
        needs.append(memory.total / options.rollout_memory)
        if needs[-1] <= cost.cluster.device.memory:
            timing = replica_timing(workload, plan, cost, options)
            queues = round_robin(workload.sequences, replica_count(layout))
            found.append((plan, RolloutState.begin(requests, timing, queues).advance().seconds))
    if not found:
        raise _nowhere(workload.actor, call, cost, min(needs, default=float("inf")), cost.cluster.devices)
    return found


def by_tensor_parallel(
    workload: Workload, cost: AnalyticCost, options: SimulationOptions
) -> dict[int, tuple[CallPlan, float]]:
    """Return the fastest rollout, and its seconds, of each degree of tensor parallelism that fits."""
    found: dict[int, tuple[CallPlan, float]] = {}
    for plan, seconds in rollouts(workload, cost, options):
        tp = plan.layout.tp
        if tp not in found or seconds < found[tp][1]:
            found[tp] = (plan, seconds)
    return dict(sorted(found.items()))


def _nowhere(model: Model, call: Call, cost: AnalyticCost, least: float, devices: int) -> FuseError:
    device = cost.cluster.device
    return FuseError(
        f"{model.name} fits nowhere for {call.name} on {devices} x {device.name} of {device.memory / 2**30:.1f} GiB; "
        f"the layout that needs least needs {least / 2**30:.1f} GiB per device"
    )
