"""Copies a model's parameters from the training workers to slices: buckets that travel through Ray's object store
(shared memory on one node, network between nodes).

With FSDP2 every rank leaves the shards it has and every slice takes the parts it needs: no rank waits for another, and
none holds the whole model. The store holds one copy, in buckets, until every slice has taken it over. FSDP1 knows its
shards only as parts of a flat parameter, so there rank 0 leaves whole parameters. Parameters travel in the dtype they
are computed in, which is that of the slice's copy.

Megatron's parameters travel as parts of the whole model (whole_megatron.py), and a slice may be cut otherwise.

Invariants (tests/integration/test_weights.py, test_megatron_slices.py):
- whatever the ranks on either side, the slice's parameters equal the training ranks';
- a parameter the slice has and nobody left, or (FSDP) the other way round, is a FuseError naming it, as is one that was
  left in part;
- of frozen parameters, which are not left, the slice keeps what it has.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_full_state_dict

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.host.weights.computed import computed_dtype, rounded
from verl_fuse.host.weights.shard import Shard

# What FSDP1 puts into the names of buffers.
_FSDP1 = "_fsdp_wrapped_module."
# An object in the store is one piece of shared memory.
OBJECT_BYTES = 256 << 20


def export_parameters(engine: Any, frozen: Collection[str] = ()) -> Iterator[list[Shard]]:
    """Buckets of this rank's shards, in the dtype computed in, but for `frozen` parameters; with FSDP1 a collective,
    whose rank 0 has them all."""
    if is_megatron(engine):
        yield from _megatron_parameters(engine)
        return
    module, computed = engine.module, computed_dtype(engine.engine_config)
    # Rotary frequencies and the like are computed with as they are.
    buffers = {name.replace(_FSDP1, "") for name, _ in module.named_buffers()}
    if fsdp_version(module) == 1:
        with engine.eval_mode():
            state: Any = get_fsdp_full_state_dict(module)
        leaves = torch.distributed.get_rank() == 0
        shards = (Shard(name, (0,) * tensor.dim(), tensor) for name, tensor in state.items() if leaves)
    else:
        shards = own_shards(module.state_dict())
    # One after the other: beside a rollout engine there is no room for a copy of them all.
    yield from in_buckets(
        replace(s, data=(s.data if s.name in buffers else rounded(s.data, computed)).cpu())
        for s in shards
        if s.name not in frozen
    )


def _megatron_parameters(engine: Any) -> Iterator[list[Shard]]:
    """Megatron computes in the dtype it keeps parameters in; offloaded ones are on the device while they are read."""
    from verl_fuse.host.weights.whole_megatron import own_parts

    with engine.eval_mode():
        yield from in_buckets(replace(shard, data=shard.data.cpu()) for shard in own_parts(engine))


def load_parameters(engine: Any, buckets: Iterable[Sequence[Shard]], frozen: Collection[str] = ()) -> None:
    """Overwrite the parameters of an engine's module, cut as it is, with those that all ranks have exported: all but
    the `frozen` ones."""
    shards = (shard for bucket in buckets for shard in bucket)
    if is_megatron(engine):
        from verl_fuse.host.weights.whole_megatron import held_parts

        parts = list(held_parts(engine))
        names = {part.name for part in parts}
        # Other stages and experts are another rank's.
        fill(parts, (shard for shard in shards if shard.name in names))
    elif fsdp_version(engine.module) == 1:
        state: dict[str, Any] = {shard.name: shard.data for shard in shards}
        set_model_state_dict(engine.module, state, options=StateDictOptions(full_state_dict=True, strict=not frozen))
    else:
        take_over(_without(engine.module.state_dict(), frozen), shards)


def _without(state: Mapping[str, torch.Tensor], frozen: Collection[str]) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def own_shards(state: Mapping[str, torch.Tensor]) -> Iterator[Shard]:
    """This rank's part of every tensor, where it is; of what several ranks hold, the first one's."""
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            if _first_holder(tensor):
                _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                yield Shard(name, tuple(offset), tensor.to_local().detach())
        elif torch.distributed.get_rank() == 0:
            yield Shard(name, (0,) * tensor.dim(), tensor.detach())


def take_over(state: Mapping[str, torch.Tensor], shards: Iterable[Shard]) -> None:
    """Copy into each tensor of `state` its part of the shards."""
    fill([Shard(name, *_part(tensor)) for name, tensor in state.items()], shards)


def fill(parts: Sequence[Shard], shards: Iterable[Shard]) -> None:
    """Copy into the data of each of `parts` what the shards have of it."""
    by_name: dict[str, list[Shard]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    missing = {name: sum(part.data.numel() for part in found) for name, found in by_name.items()}
    for shard in shards:
        if shard.name not in by_name:
            raise FuseError(f"weights of a slice: it has no parameter {shard.name!r}, which was exported")
        missing[shard.name] -= sum(_copy(shard, part.offset, part.data) for part in by_name[shard.name])
    wrong = [name for name, elements in missing.items() if elements]
    if wrong:
        raise FuseError(
            f"weights of a slice: {len(wrong)} parameters were not exported as a whole, first {wrong[0]!r} "
            f"({missing[wrong[0]]} elements)"
        )


def _part(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """(offset, data) of what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tensor.to_local()


def _copy(shard: Shard, offset: tuple[int, ...], data: torch.Tensor) -> int:
    """Copy what `shard` and `data`, which begins at `offset`, have in common; its number of elements."""
    from_, to = [], []
    for theirs, length, ours, size in zip(shard.offset, shard.data.shape, offset, data.shape, strict=True):
        begin, end = max(theirs, ours), min(theirs + length, ours + size)
        if end <= begin:
            return 0
        from_.append(slice(begin - theirs, end - theirs))
        to.append(slice(begin - ours, end - ours))
    common = data[tuple(to)]
    with torch.no_grad():
        common.copy_(shard.data[tuple(from_)])
    return common.numel()


def _first_holder(tensor: DTensor) -> bool:
    """Whether no rank before this one holds the same part."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its own mesh"
    return not any(at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def in_buckets(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Neighbours together, OBJECT_BYTES or one shard at most."""
    bucket: list[Shard] = []
    size = 0
    for shard in shards:
        if bucket and size + shard.data.nbytes > OBJECT_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(shard)
        size += shard.data.nbytes
    if bucket:
        yield bucket
