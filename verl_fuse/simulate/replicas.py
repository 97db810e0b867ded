"""Computes the number of generation replicas of a call's plan, and their speed."""

import math
from dataclasses import replace
from functools import lru_cache, partial

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.model import Batch
from verl_fuse.errors import FuseError
from verl_fuse.simulate.drafts import with_drafts
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.timing import DecodeSeconds, ReplicaTiming
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Workload


def replica_layout(layout: Layout) -> Layout:
    """Return the layout of one replica: one data-parallel rank, or as many as share out the experts between them."""
    own = layout.cp if layout.dp * layout.cp % layout.ep == 0 else layout.cp * layout.tp
    ranks = layout.ep // math.gcd(layout.ep, own)
    return replace(layout, dp=ranks)


def replica_count(layout: Layout) -> int:
    return layout.devices // replica_layout(layout).devices


def replicas_of(plan: Plan) -> int:
    """Return the number of replicas that generate in a plan."""
    return plan.replicas or replica_count(plan.call("actor_generate").layout)


def devices_each(plan: Plan) -> int:
    """Return the number of devices of each of them."""
    return plan.call("actor_generate").mesh.size // replicas_of(plan)


@lru_cache(maxsize=256)
def replica_timing(workload: Workload, call: CallPlan, cost: AnalyticCost, options: SimulationOptions) -> ReplicaTiming:
    """Return the tables of one replica, which drafts where the options give an acceptance; where the longest sequence
    does not fit, a FuseError says how much memory is missing."""
    model, layout = workload.actor, replica_layout(call.layout)
    device = cost.cluster.device
    weights = cost.memory(model, "generate", layout).total
    room = device.memory * options.rollout_memory
    capacity = layout.dp * cost.kv_capacity(model, layout, max(0.0, room - weights))
    longest = workload.prompt.maximum + workload.response.maximum
    if capacity < longest:
        raise FuseError(
            f"{model.name} as {layout} on {device.name}: weights and buffers take {weights / 2**30:.1f} of "
            f"{room / 2**30:.1f} GiB for the rollout (rollout_memory={options.rollout_memory:g}), which leaves room "
            f"for {capacity} tokens; one sequence has up to {longest}. More tensor parallelism or a larger "
            "rollout_memory would do"
        )

    engine: DecodeSeconds = partial(cost.decode, model, layout)
    if options.acceptance is not None:
        engine = with_drafts(partial(cost.verify, model, layout), options.acceptance)
    return ReplicaTiming.build(
        lambda sequences, tokens: engine(sequences / layout.dp, tokens / layout.dp),
        lambda sequences, tokens: cost.prefill(model, layout, Batch.equal(sequences / layout.dp, tokens)),
        max_batch=min(options.max_num_seqs, workload.sequences),
        kv_capacity=capacity,
        longest=longest,
        prefill_budget=options.max_num_batched_tokens,
    )


def mean_batch(workload: Workload) -> Batch:
    """Return the expected whole batch, prompts with responses; the two lengths are taken as independent."""
    mean = workload.prompt.mean + workload.response.mean
    square = workload.prompt.mean_square + workload.response.mean_square
    square += 2 * workload.prompt.mean * workload.response.mean
    return Batch(workload.sequences, workload.sequences * mean, workload.sequences * square)
