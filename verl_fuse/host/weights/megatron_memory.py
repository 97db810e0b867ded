"""Counts a Megatron rank's share of a trained model, as `verl_fuse.spec.memory` defines it.

A trained model is Megatron's DDP over flat buffers; its optimizer owns float32 copies of a part of the parameters, and
two moments of as many bytes come with the first step. verl offloads weights together with gradients, and the
optimizer's copies together with its moments.

Invariants (tests/integration/test_megatron_slices.py, tests/unit/host/test_rank_memory.py):
- parameters are the ones that a copy has of this rank's stage, every expert by itself, a tied head once;
- all ranks together leave the model, once.
"""

from typing import Any

from verl_fuse.host.weights.whole_megatron import gpt_model, is_second_head, own_bytes

# Adam's.
_MOMENTS = 2


def megatron_share(engine: Any, on_host: bool) -> dict[str, Any]:
    """Return the fields of a `RankMemory` that are about the model; `on_host`: the device is the host. Sizes alone are
    read, which offloaded parameters have as well."""
    model = gpt_model(engine)
    groups, parameters, second_head = model.pg_collection, [], 0
    for name, parameter in model.named_parameters():
        if is_second_head(name, model):
            second_head += parameter.numel()
        elif ".experts." in name:
            # A copy cuts experts as all else, and has them all.
            parameters += [parameter.numel() * groups.expt_tp.size() // groups.tp.size()] * groups.ep.size()
        else:
            parameters.append(parameter.numel())
    shard = sum(parameter.nbytes for parameter in model.parameters())
    kept, awaited = _trained(engine, shard, on_host)
    value_model = engine.model_config.model_type == "value_model"
    return {
        "parameters": tuple(parameters),
        "outputs": 1 if value_model else model.vocab_size // groups.tp.size(),
        "shard": shard,
        "kept": kept,
        "awaited": awaited,
        "stage": groups.pp.rank(),
        "second_head": second_head,
        "left": own_bytes(engine),
    }


def offloaded_bytes(engine: Any) -> int:
    """Return the bytes that come to the device while an engine trains, and are offloaded between its calls."""
    weights, optimizer = _held(engine)
    return weights * engine.is_param_offload_enabled + optimizer * engine.is_optimizer_offload_enabled


def _trained(engine: Any, shard: int, on_host: bool) -> tuple[int, int]:
    """Return (bytes on the device between two calls, bytes that come to host memory with the first step)."""
    if engine.optimizer is None:
        return (0 if engine.is_param_offload_enabled else shard), 0
    weights, optimizer = _held(engine)
    kept = 0 if engine.is_param_offload_enabled else weights
    if not (engine.is_optimizer_offload_enabled or on_host):
        return kept + optimizer, 0
    arrived = bool(engine.optimizer.state)
    return kept, 0 if arrived else optimizer * _MOMENTS // (1 + _MOMENTS)


def _held(engine: Any) -> tuple[int, int]:
    """Return (bytes of weights and gradients, bytes of the optimizer's copies and moments) of an engine that trains."""
    buffers = [buffer for chunk in engine.module for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = sum(parameter.nbytes for chunk in engine.module for parameter in chunk.parameters())
    owned = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    return weights + gradients, (1 + _MOMENTS) * sum(parameter.nbytes for parameter in owned)
