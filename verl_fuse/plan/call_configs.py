"""Lists every configuration worth considering for a call: legal layouts, micro-batchings, offload; the cost of each by
the cost model.

Invariants (tests/unit/plan/test_call_configs.py):
- an option that needs more than the limit on its own is left out;
- of two options with the same mesh size and layout, none is kept that needs as much of everything as the other, or
  more;
- for a role without a train call the layout does not matter either, because its weights never move.
"""

from collections.abc import Iterable, Iterator, Sequence

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.model import Batch
from verl_fuse.plan.generation import GenerationEstimates
from verl_fuse.plan.layouts import legal_layouts
from verl_fuse.plan.space import CallConfig
from verl_fuse.simulate.calls import with_entropy
from verl_fuse.simulate.replicas import mean_batch
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.workload import Call, Workload

# Micro-batches per rank that are looked at even where fewer would hold a single sequence each.
MICROBATCHES = 64
WAVES = (1, 2, 4, 8)
# What stays beside a rollout, in buffers of a process: those of the trainer that sleeps, and the engine's graphs.
LEFT_BUFFERS = 2


def configs_on_sizes(
    call: Call, workload: Workload, cost: AnalyticCost, sizes: Iterable[int], limit: float
) -> tuple[CallConfig, ...]:
    """Return the configurations of `call` on meshes of each of `sizes` devices within `limit` bytes per device."""
    trained = any(other.role == call.role and other.kind == "train" for other in workload.calls)
    kept: list[CallConfig] = []
    generation = GenerationEstimates(workload, cost)
    for size in sizes:
        layouts = legal_layouts(workload.model(call.role), call.kind, workload, size, cost.cluster.devices_per_node)
        found = configs_in_layouts(call, workload, cost, layouts, limit, generation)
        kept += found if trained else _pareto(found)
    return tuple(kept)


def configs_in_layouts(
    call: Call,
    workload: Workload,
    cost: AnalyticCost,
    layouts: Iterable[Layout],
    limit: float,
    generation: GenerationEstimates,
) -> tuple[CallConfig, ...]:
    """Return the configurations of `call` in these layouts within `limit` bytes per device."""
    of_layouts = (_variants(call, workload, cost, layout, generation) for layout in layouts)
    return tuple(kept for found in of_layouts for kept in _pareto([config for config in found if config.peak <= limit]))


def least_bytes(call: Call, workload: Workload, cost: AnalyticCost, sizes: Iterable[int]) -> float:
    """Return the least memory per device with which the call alone runs; infinite if no layout divides the model."""
    found = configs_on_sizes(call, workload, cost, sizes, float("inf"))
    return min((config.peak for config in found), default=float("inf"))


def _variants(
    call: Call, workload: Workload, cost: AnalyticCost, layout: Layout, generation: GenerationEstimates
) -> Iterator[CallConfig]:
    if call.kind == "generate":
        yield from (generate(workload, cost, layout, waves, generation) for waves in WAVES)
        return
    updates = workload.minibatches if call.kind == "train" else 1
    each = workload.sequences // (updates * layout.dp)
    offloads = (False,) if call.kind == "infer" and call.role in ("actor", "critic") else (False, True)
    for microbatches in _splits(each, mean_batch(workload).tokens / (updates * layout.dp), _longest(workload)):
        yield from (compute(call, workload, cost, layout, microbatches, offload) for offload in offloads)


def _splits(sequences: int, tokens: float, longest: int) -> Iterator[int]:
    """Yield powers of two that divide the sequences of a rank, until a part is no longer than the longest sequence:
    smaller parts need as much memory."""
    number = 1
    while sequences % number == 0 and (number <= MICROBATCHES or 2 * tokens > number * longest):
        yield number
        number *= 2


def _longest(workload: Workload) -> int:
    return workload.prompt.maximum + workload.response.maximum


def generate(
    workload: Workload, cost: AnalyticCost, layout: Layout, waves: int, generation: GenerationEstimates
) -> CallConfig:
    """Return the configuration of generation whose KV cache holds 1/waves of a replica's sequences; its seconds begin
    with handing the weights over, but for their transfer."""
    memory = cost.memory(workload.actor, "generate", layout, kv_tokens=generation.kv_tokens(layout, waves))
    active = memory.active + LEFT_BUFFERS * memory.buffers
    seconds = handing_over(workload, cost) + generation.seconds(layout, waves)
    return CallConfig(layout, waves, False, seconds, 0.0, active, memory.weights)


def handing_over(workload: Workload, cost: AnalyticCost) -> float:
    """Return the seconds of a weight sync that moves no weight: no plan goes without them."""
    there = (Mesh(0, 1), Layout())
    return cost.sync(workload.actor, there, there)


def compute(
    call: Call, workload: Workload, cost: AnalyticCost, layout: Layout, microbatches: int, offload: bool
) -> CallConfig:
    """Return the configuration of inference or training; `microbatches` per data-parallel rank, and in training per
    mini-batch."""
    model, batch = workload.model(call.role), mean_batch(workload)
    updates = workload.minibatches if call.kind == "train" else 1
    part = batch.split(updates * layout.dp * microbatches)
    part = Batch(part.sequences, max(part.tokens, float(_longest(workload))), part.squares)
    memory = cost.memory(model, call.kind, layout, microbatch=part, microbatches=microbatches, offload=offload)
    if call.kind == "train":
        seconds = workload.epochs * cost.train(model, layout, batch, updates, microbatches)
        # In before the call, out after it.
        seconds += 2 * cost.offload(memory.model) if offload else 0.0
        return CallConfig(layout, microbatches, offload, seconds, memory.static, memory.active)
    seconds = cost.infer(model, layout, batch, microbatches, entropy=with_entropy(call))
    if call.role in ("actor", "critic"):
        return CallConfig(layout, microbatches, False, seconds, 0.0, memory.active, memory.weights)
    seconds += cost.offload(memory.model) if offload else 0.0
    return CallConfig(layout, microbatches, offload, seconds, memory.static, memory.active)


def _pareto(options: Sequence[CallConfig]) -> list[CallConfig]:
    """Return the options that no other option equals or beats in seconds, resident, active and copied bytes; the first
    of equals."""
    kept: list[CallConfig] = []
    for config in sorted(options, key=lambda w: (w.needs, w.microbatches)):
        if not any(all(a <= b for a, b in zip(other.needs, config.needs, strict=True)) for other in kept):
            kept.append(config)
    return kept
