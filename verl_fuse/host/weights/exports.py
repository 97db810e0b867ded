"""Leaves the parameters of training ranks for slices in Ray's object store: all parameters once, and from then on the
trained parameters.

With LoRA only adapters are trained, so a step's export is as small as the adapters.

Invariants (tests/integration/test_slice_models.py):
- a parameter is left out only where it is not trained, and only after it was exported once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.utils.fsdp_utils import fsdp_version

from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.host.weights.buckets import export_parameters


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


def frozen_parameters(module: torch.nn.Module) -> frozenset[str]:
    """Return the names, as in the module's state, of the parameters that are not trained."""
    if fsdp_version(module) == 1:
        # The state of FSDP1 would be gathered whole, and LoRA is refused with it.
        return frozenset()
    state = module.state_dict(keep_vars=True)
    return frozenset(name for name, tensor in state.items() if _is_frozen(tensor))


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
