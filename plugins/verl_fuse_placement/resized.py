"""Extends verl's worker class of the critic: its checkpoint is loaded by another number of ranks than wrote it.

verl names the files of a checkpoint by the number of ranks, and a rank loads its own file (fsdp_checkpoint_manager.py).
Here each rank first writes its own files for the number of ranks that there are into a folder that it then deletes, and
verl loads these files. All files of the checkpoint must be readable by every rank, and the temporary folder (TMPDIR)
must have room for a rank's share.

Invariants (tests/integration/test_resized_checkpoint.py):
- parameters, the optimizer's state and the learning rate's schedule are those that were saved;
- a checkpoint of as many ranks is loaded by verl alone.
"""

import functools
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_fuse.errors import FuseError

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER, _EXTRA = ("model", "optim", "extra_state")


def resized_worker_class(base: type) -> type:
    """Return a subclass of verl's worker class `base`, whose engine is FSDP2."""
    load = base.load_checkpoint  # type: ignore[attr-defined]

    @functools.wraps(load)
    def load_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        from verl_fuse_placement.resized import resize, written_by

        if (wrote := written_by(Path(local_path), self.world_size)) is None:
            return load(self, local_path, *args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="verl_fuse_resized") as folder:
            resize(Path(local_path), wrote, Path(folder), self.engine, self.rank, self.world_size)
            return load(self, folder, *args, **kwargs)

    return type(f"Resized{base.__name__}", (base,), {"__doc__": base.__doc__, "load_checkpoint": load_checkpoint})


def written_by(folder: Path, ranks: int) -> int | None:
    """Return the number of ranks that wrote the checkpoint, None where it is `ranks`. verl leaves files there that an
    earlier run wrote with another number: the newest are read. A FuseError where times do not tell them apart."""
    times: dict[int, list[int]] = {}
    for file in folder.glob("*_world_size_*_rank_*.pt"):
        times.setdefault(int(re.findall(r"\d+", file.name)[0]), []).append(file.stat().st_mtime_ns)
    found = sorted(times, key=lambda wrote: max(times[wrote]))
    if len(found) > 1:
        older, newest = (times[wrote] for wrote in found[-2:])
        if min(newest) <= max(older) or len(newest) % found[-1]:
            why = "a copy without its times, or a save that broke off: move the files of one number away"
            raise FuseError(
                f"{folder}: a checkpoint of {sorted(found)} ranks; needs one set newer than the other ({why})"
            )
        logger.warning("%s: saved by %s ranks, in turn; the files of %d are read", folder, found, found[-1])
    return None if not found or found[-1] == ranks else found[-1]


def resize(source: Path, wrote: int, target: Path, engine: Any, rank: int, ranks: int) -> None:
    """Write this rank's files of a checkpoint that `wrote` ranks left in `source`. A FuseError names files that are
    missing."""

    def file_of(kind: str, number: int) -> Path:
        return source / f"{kind}_world_size_{wrote}_rank_{number}.pt"

    def saved(kind: str) -> bool:
        missing = [file_of(kind, number).name for number in range(wrote) if not file_of(kind, number).exists()]
        if 0 < len(missing) < wrote:
            raise FuseError(
                f"{source}: {', '.join(missing)} missing; needs the files of all {wrote} ranks that saved it"
            )
        return not missing

    def read(kind: str, number: int) -> Any:
        return torch.load(file_of(kind, number), map_location="cpu", weights_only=False, mmap=True)

    def write(kind: str, data: Any) -> None:
        torch.save(data, target / f"{kind}_world_size_{ranks}_rank_{rank}.pt")

    moulds = engine.module.state_dict()
    if saved(_MODEL):
        parts = [read(_MODEL, number) for number in range(wrote)]
        write(_MODEL, {name: _own([part[name] for part in parts], moulds[name], name) for name in parts[0]})
    if saved(_OPTIMIZER):
        write(_OPTIMIZER, _optimizer([read(_OPTIMIZER, number) for number in range(wrote)], engine.optimizer))
    if saved(_EXTRA):
        # A rank that is new draws as one that was there.
        write(_EXTRA, read(_EXTRA, rank % wrote))


def _optimizer(parts: Sequence[Mapping[str, Any]], optimizer: Any) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in parts[0]["param_groups"] for number in group["params"]]
    moulds = dict(zip(numbers, parameters, strict=True))
    states = {
        number: {
            key: _own([part["state"][number][key] for part in parts], moulds[number], f"{key} of parameter {number}")
            for key in state
        }
        for number, state in parts[0]["state"].items()
    }
    return {**parts[0], "state": states}


def _own(parts: Sequence[Any], mould: Any, name: str) -> Any:
    """Return this rank's part, in the layout of `mould`, of a value that all ranks saved a part of."""
    first = parts[0]
    if not isinstance(first, DTensor) or not isinstance(mould, DTensor):
        return first
    whole = _whole(parts, name)
    shape, offset = compute_local_shape_and_global_offset(mould.shape, mould.device_mesh, mould.placements)
    local = whole[offset[0] : offset[0] + shape[0]]
    local = local.to(device=mould.to_local().device).clone()
    return DTensor.from_local(
        local, mould.device_mesh, mould.placements, run_check=False, shape=mould.shape, stride=mould.stride()
    )


def _whole(parts: Sequence[DTensor], name: str) -> torch.Tensor:
    placements, mesh = tuple(parts[0].placements), parts[0].device_mesh.mesh
    if placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise FuseError(f"checkpoint: {name} is placed {placements}; needs (Shard(0),) or (Replicate(), Shard(0))")
    # Of several copies the first.
    ranks = (mesh if mesh.dim() == 1 else mesh[0]).tolist()
    return torch.cat([parts[number].to_local() for number in ranks])
