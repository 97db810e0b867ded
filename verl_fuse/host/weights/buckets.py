"""Copies a model's parameters from the training workers to slices: buckets that travel through Ray's object store
(shared memory on one node, network between nodes).

With FSDP2 every rank leaves its shards and every slice takes the parts that it needs: no rank waits for another, and no
rank holds the whole model. The store holds one copy, in buckets, until every slice has taken it over. FSDP1 knows its
shards only as parts of a flat parameter, so with FSDP1 rank 0 leaves whole parameters. Parameters travel in the dtype
of computation, which is that of the slice's copy.

Megatron's parameters travel as parts of the whole model (whole_megatron.py), and a slice may be cut otherwise.

Invariants (tests/integration/test_weights.py, test_megatron_slices.py, tests/unit/host/test_shards.py):
- whatever the ranks on either side, the slice's parameters equal the training ranks';
- a parameter that the slice has and no rank left, or (FSDP) the other way round, is a FuseError naming the parameter,
and so is a parameter that was left in part;
- the slice keeps its frozen parameters, which are not left.
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

# FSDP1 puts this into the names of buffers.
_FSDP1 = "_fsdp_wrapped_module."
# An object in the store is one piece of shared memory.
OBJECT_BYTES = 256 << 20


def export_parameters(engine: Any, frozen: Collection[str] = ()) -> Iterator[list[Shard]]:
    """Yield buckets of this rank's shards, in the dtype of computation, without `frozen` parameters; with FSDP1 a
    collective, whose rank 0 has all shards."""
    if is_megatron(engine):
        yield from _megatron_parameters(engine)
        return
    module, computed = engine.module, computed_dtype(engine.engine_config)
    # Buffers such as rotary frequencies are not rounded.
    buffers = {name.replace(_FSDP1, "") for name, _ in module.named_buffers()}
    if fsdp_version(module) == 1:
        with engine.eval_mode():
            # On a CPU, FSDP1 takes what it gathered for a copy in the host's memory, and frees it.
            on_device = next(module.parameters()).device.type != "cpu"
            state: Any = get_fsdp_full_state_dict(module, offload_to_cpu=on_device)
        leaves = torch.distributed.get_rank() == 0
        shards = (Shard(name, (0,) * tensor.dim(), tensor) for name, tensor in state.items() if leaves)
    else:
        shards = own_shards(module.state_dict())
    # Parameters go one after the other: beside a rollout engine there is no room for a copy of all.
    yield from in_buckets(
        replace(s, data=(s.data if s.name in buffers else rounded(s.data, computed)).cpu())
        for s in shards
        if s.name not in frozen
    )


def _megatron_parameters(engine: Any) -> Iterator[list[Shard]]:
    """Yield buckets of a Megatron engine's parameters, in the dtype it keeps and computes in; offloaded parameters are
    on the device while they are read."""
    from verl_fuse.host.weights.whole_megatron import own_parts

    with engine.eval_mode():
        yield from in_buckets(replace(shard, data=shard.data.cpu()) for shard in own_parts(engine))


def load_parameters(engine: Any, buckets: Iterable[Sequence[Shard]], frozen: Collection[str] = ()) -> None:
    """Overwrite the parameters of an engine's module, cut as it is, with the parameters that all ranks have exported:
    all but the `frozen` parameters."""
    shards = (shard for bucket in buckets for shard in bucket)
    if is_megatron(engine):
        from verl_fuse.host.weights.whole_megatron import held_parts

        parts = list(held_parts(engine))
        names = {part.name for part in parts}
        # Other stages and experts belong to another rank.
        fill(parts, (shard for shard in shards if shard.name in names))
    elif fsdp_version(engine.module) == 1:
        state: dict[str, Any] = {shard.name: shard.data for shard in shards}
        set_model_state_dict(engine.module, state, options=StateDictOptions(full_state_dict=True, strict=not frozen))
    else:
        take_over(_without(engine.module.state_dict(), frozen), shards)


def _without(state: Mapping[str, torch.Tensor], frozen: Collection[str]) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def own_shards(state: Mapping[str, torch.Tensor]) -> Iterator[Shard]:
    """Yield this rank's part of every tensor, at its place; only the first of several holders yields a part."""
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
    """Copy into the data of each of `parts` its elements in the shards."""
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
    """Return (offset, data) of the part of a tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tensor.to_local()


def _copy(shard: Shard, offset: tuple[int, ...], data: torch.Tensor) -> int:
    """Copy the elements that `shard` and `data`, which begins at `offset`, have in common; return their number."""
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
    """Tell whether no rank before this rank holds the same part."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its own mesh"
    return not any(at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def in_buckets(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Yield neighbouring shards together, OBJECT_BYTES or one shard at most."""
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
