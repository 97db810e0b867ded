"""Counts the memory of a training rank (`verl_fuse.spec.memory`): FSDP's here, Megatron's in megatron_memory.py.

Invariants (tests/integration/test_slice_models.py, tests/unit/host/test_rank_memory.py):
- FSDP's parameters are counted whole, however they are sharded.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name, get_torch_device

from verl_fuse.free_memory import free_memory
from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.spec.memory import RankMemory

# Adam has two.
_MOMENTS = 2


def rank_memory(engine: Any, node: str, store: int | None = None) -> RankMemory:
    """Return this rank's share of an engine that is trained, on the node of this name, whose object store holds `store`
    bytes."""
    device = None if get_device_name() == "cpu" else get_torch_device().mem_get_info()[1]
    if is_megatron(engine):
        from verl_fuse.host.weights.megatron_memory import megatron_share

        share = megatron_share(engine, device is None)
    else:
        share = _fsdp_share(engine, device is None)
    return RankMemory(node=node, host_free=free_memory(), device=device, store=store, **share)


def _fsdp_share(engine: Any, on_host: bool) -> dict[str, Any]:
    elements, local = zip(*_elements(engine), strict=True)
    shard = sum(tensor.nbytes for tensor in local)
    offloaded = engine._uses_fsdp2_cpu_offload_policy
    kept = 0 if offloaded or engine.is_param_offload_enabled else shard
    # Moments of trained parameters come with the first step, or from a checkpoint.
    owned = zip(local, engine.module.parameters(), strict=True)
    trained = sum(tensor.nbytes for tensor, parameter in owned if parameter.requires_grad)
    optimizer = engine.optimizer
    moments = 0 if optimizer is None else _MOMENTS * trained
    arrived = optimizer is not None and bool(optimizer.state)
    in_host = offloaded or engine.is_optimizer_offload_enabled or on_host
    config = engine.model_config.hf_config
    value_model = engine.model_config.model_type == "value_model"
    return {
        "parameters": elements,
        "outputs": 1 if value_model else config.get_text_config().vocab_size,
        "shard": shard,
        "kept": kept + (0 if in_host else moments),
        "awaited": moments if in_host and not arrived else 0,
    }


def store_bytes(node: str) -> int:
    """Return the bytes that Ray's object store holds on the node of this name."""
    (found,) = [known["Resources"] for known in ray.nodes() if known["NodeID"] == node]
    return int(found["object_store_memory"])


def _elements(engine: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of elements of each whole parameter, and this rank's part of the parameter."""
    for parameter in engine.module.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.numel(), parameter.to_local()
        else:
            # A flat parameter of FSDP1 knows its own part alone; all parts have the same length.
            yield parameter.numel() * engine.device_mesh.size(-1), parameter
