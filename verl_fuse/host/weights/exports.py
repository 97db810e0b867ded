"""Leaves the parameters of training ranks in Ray's object store: for slices each rank's shards, all once and from then
on the trained ones; for standalone replicas whole parameters.

With LoRA only adapters are trained, so a step's export for slices is as small as the adapters.

Invariants (tests/integration/test_slice_models.py, test_standalone_run.py):
- a parameter is left out only where it is not trained, and only after it was exported once;
- each bucket of whole parameters is left by one training rank, in turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from verl.utils.fsdp_utils import fsdp_version

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.host.weights.buckets import export_parameters, in_buckets
from verl_fuse.host.weights.shard import Shard


@dataclass(frozen=True)
class Export:
    """`buckets` are references to lists of shards, `nbytes` their bytes, `frozen` the names of the parameters that are
    not in the buckets."""

    buckets: tuple[ray.ObjectRef, ...]
    nbytes: int
    frozen: frozenset[str]


def export_weights(engine: Any, whole: bool) -> Export:
    """Return this rank's share of the parameters of an engine: of all (`whole`), or of the trained ones."""
    # All parameters of Megatron are trained: LoRA is refused with it.
    frozen = frozenset() if whole or is_megatron(engine) else frozen_parameters(engine.module)
    references, nbytes = [], 0
    for bucket in export_parameters(engine, frozen):
        nbytes += sum(shard.data.nbytes for shard in bucket)
        references.append(ray.put(bucket))
    return Export(tuple(references), nbytes, frozen)


def joined(ranks: Sequence[Export]) -> Export:
    """Return the exports of all ranks of a model as one export."""
    buckets = tuple(bucket for rank in ranks for bucket in rank.buckets)
    return Export(buckets, sum(rank.nbytes for rank in ranks), ranks[0].frozen)


def export_whole(engine: Any, rank: int, ranks: int) -> list[ray.ObjectRef]:
    """Return references to the buckets that this rank leaves: whole parameters under their Hugging Face names, in the
    form and types that verl hands to a checkpoint engine: an engine keeps some in float32 (routers of experts).
    Collective over the `ranks` training ranks.

    Every rank gathers each parameter. Buckets are dealt out in turns, so that no rank's device, host and network carry
    all buckets."""
    parameters, adapter = engine.get_per_tensor_param()
    if adapter is not None:
        raise FuseError("weights of standalone replicas: an adapter that is not merged cannot be sent")
    whole = (Shard(name, (0,) * tensor.dim(), tensor.detach()) for name, tensor in parameters)
    references = [
        ray.put([replace(shard, data=shard.data.cpu()) for shard in bucket])
        for number, bucket in enumerate(in_buckets(whole))
        if number % ranks == rank
    ]
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    return references


def frozen_parameters(module: torch.nn.Module) -> frozenset[str]:
    """Return the names, as in the module's state, of the parameters that are not trained."""
    if fsdp_version(module) == 1:
        # The state of FSDP1 would be gathered whole, and LoRA is refused with it.
        return frozenset()
    state = module.state_dict(keep_vars=True)
    return frozenset(name for name, tensor in state.items() if _is_frozen(tensor))


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
