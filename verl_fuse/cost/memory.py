"""Computes the bytes on the fullest device of a model call.

Training keeps bf16 weights and fp32 gradients whole, and shares fp32 master weights and two Adam moments over
data-parallel ranks (Megatron's distributed optimizer); in a layout with `shards` (FSDP, ZeRO-3) everything is fp32 and
shared by the shards, and a block at a time is gathered. Activations follow Korthikanti et al. 2022 (arXiv 2205.05198)
with sequence parallelism and without a score matrix (flash attention).
"""

from dataclasses import dataclass

from verl_fuse.cost.model import Batch, Memory
from verl_fuse.cost.shard import BYTES, block_parameters, expert_block_parameters, kv_bytes_per_token
from verl_fuse.spec.cluster import Device
from verl_fuse.spec.layout import Layout, stage_layers
from verl_fuse.spec.model import Model
from verl_fuse.spec.workload import CallKind

# Driver context, communication buffers and fragmentation of a GPU process; assumed.
GPU_BUFFERS = 3 * 2**30


@dataclass(frozen=True)
class MemoryRequest:
    """A call as its memory sees it: see `AnalyticCost.memory`."""

    kind: CallKind
    microbatch: Batch
    microbatches: int
    kv_tokens: float
    recompute: bool
    offload: bool


def memory(model: Model, layout: Layout, request: MemoryRequest, device: Device) -> Memory:
    """Return the memory of the fullest of the pipeline's stages."""
    stages = stage_layers(model.layers, layout.pp)
    # Of stages with as many blocks the first holds the most micro-batches; the last one holds the head.
    outer = {stages.index(layers) for layers in set(stages)} | {0, layout.pp - 1}
    found = [_stage(model, layout, request, device, stage, stages[stage]) for stage in sorted(outer)]
    return max(found, key=lambda m: m.total)


def _stage(
    model: Model,
    layout: Layout,
    request: MemoryRequest,
    device: Device,
    stage: int,
    layers: int,
) -> Memory:
    first, last = stage == 0, stage == layout.pp - 1
    elements = layers * block_parameters(model, layout)
    elements += (model.embedding_parameters / layout.tp if first else 0) + _head(model, layout, first, last)
    buffers = 0.0 if device.is_cpu else float(GPU_BUFFERS)
    training = request.kind == "train"
    if layout.shards:
        each = (4, 4, 8) if training else (4, 0, 0)
        weights, gradients, optimizer = (size * elements / layout.shards for size in each)
        buffers += 2 * BYTES * block_parameters(model, layout)
    elif training:
        # Experts have fewer copies than the rest, which share their optimizer states out.
        experts, copies = layers * expert_block_parameters(model, layout), layout.dp * layout.cp
        own = (elements - experts) / copies + experts * layout.ep * layout.expert_tp / (layout.tp * copies)
        weights, gradients, optimizer = BYTES * elements, 4 * elements, 12 * own
    else:
        weights, gradients, optimizer = BYTES * elements, 0.0, 0.0
    kv = request.kv_tokens * layers * kv_bytes_per_token(model, layout)
    activations = _activations(model, layout, request, stage)
    return Memory(weights, gradients, optimizer, activations, kv, buffers, request.offload)


def _head(model: Model, layout: Layout, first: bool, last: bool) -> float:
    """Return the elements of the head on one device. A tied head has a copy of its own where embedding and head are on
    different devices."""
    if not last:
        return 0.0
    return (model.embedding_parameters if model.tied_embeddings and not first else model.head_parameters) / layout.tp


def held_activations(model: Model, layout: Layout, tokens: float, recompute: bool) -> tuple[float, ...]:
    """Return the bytes that each stage holds of one micro-batch of `tokens` tokens from its forward to its backward:
    every block's input, or all activations of a block."""
    each = _block_input(model, layout, tokens) if recompute else _block_activations(model, layout, tokens)
    return tuple(layers * each for layers in stage_layers(model.layers, layout.pp))


def _activations(model: Model, layout: Layout, request: MemoryRequest, stage: int) -> float:
    tokens = request.microbatch.tokens
    last = stage == layout.pp - 1 and request.kind != "generate"
    logits = tokens * model.head_width / (layout.tp * layout.cp) if last else 0.0
    block = _block_activations(model, layout, tokens)
    if request.kind != "train":
        # One block's working set, and logits in half and full precision.
        return block + _block_input(model, layout, tokens) + 6 * logits
    # 1F1B: a stage holds as many micro-batches as there are stages from it to the end.
    in_flight = min(request.microbatches, layout.pp - stage)
    held = held_activations(model, layout, tokens, request.recompute)[stage]
    return in_flight * held + (block if request.recompute else 0.0) + 10 * logits


def _block_activations(model: Model, layout: Layout, tokens: float) -> float:
    active = max(1, model.experts_per_token) * model.intermediate + model.shared_intermediate
    # Experts get copies of their tokens, and give copies back.
    values = (6 + 2 * model.experts_per_token) * model.hidden + 3 * active
    values += 2 * (model.heads + model.kv_heads) * model.head_dim
    return BYTES * tokens * values / (layout.tp * layout.cp)


def _block_input(model: Model, layout: Layout, tokens: float) -> float:
    return BYTES * tokens * model.hidden / (layout.tp * layout.cp)
