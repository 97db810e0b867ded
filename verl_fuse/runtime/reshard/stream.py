"""Streams parameters from one layout to another, a few at a time: for a receiver that loads them elsewhere and keeps
none.

Invariants (tests/unit/runtime/test_stream.py):
- the elements that a rank gets of a parameter are bitwise the source's, converted to the type on the way; the other
elements are NaN;
- besides the source's tensors a rank needs one bucket, or half a bucket and the largest parameter if the sum is more;
- a rank whose receiver leaves early stops all ranks, by name;
- all ranks stream the same version; `held_version` has the version only when the last parameter has been taken.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from verl_fuse.reshard.chunks import chunks
from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.program import MESSAGES_PER_BUCKET, plan_transfer
from verl_fuse.reshard.sharding import LocalTensor, PlacedSharding
from verl_fuse.runtime.blame import Verdict
from verl_fuse.runtime.port import Port
from verl_fuse.runtime.reshard.transfer import Transfer, TransferReport
from verl_fuse.runtime.reshard.version import WeightVersion
from verl_fuse.runtime.watch import Stopped, Watch


@dataclass(frozen=True)
class StreamRoute:
    """The terms that all ranks agree on: the layouts, the node of each rank, the type on the way, and the bytes a rank
    may need beside its own tensors."""

    weights: ModelParameters
    source: PlacedSharding
    target: PlacedSharding
    nodes: tuple[int, ...]
    dtype: torch.dtype
    bucket_bytes: int
    checksums: bool = False


class ParameterStream:
    """One rank's part, looked up once; runs any number of times. `name` is the name of the receiver's weights in
    errors."""

    def __init__(
        self, name: str, route: StreamRoute, rank: int, port: Port, watch: Watch, device: torch.device | str = "cpu"
    ) -> None:
        self._route, self._rank, self._port, self._watch = route, rank, port, watch
        self._device = torch.device(device)
        self.held_version = WeightVersion(name)
        self.reports: list[TransferReport] = []
        item = route.dtype.itemsize
        half = max(route.bucket_bytes // 2, MESSAGES_PER_BUCKET * item)
        self._parts = [
            (chunk, Transfer(program, rank, port, watch, dtype=route.dtype, device=device, checksums=route.checksums))
            for chunk in chunks(route.weights, half // item)
            for program in [
                plan_transfer(chunk, route.source, route.target, nodes=route.nodes, item_bytes=item, bucket_bytes=half)
            ]
        ]

    def run(self, tensors: Mapping[str, torch.Tensor], version: int) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the parameters of this rank's target, name and tensor, as they arrive; `tensors` are the source's. All
        ranks run to the end.

        `reports` then has one report per chunk. After an error neither port nor watch is of further use.
        """
        self.reports.clear()
        source, target = self._route.source, self._route.target
        with self.held_version.writing(version):
            for chunk, transfer in self._parts:
                own = {tensor.name: tensors[tensor.name] for tensor in source.tensors(chunk, self._rank)}
                room = {tensor.name: self._room(tensor) for tensor in target.tensors(chunk, self._rank)}
                self.reports.append(transfer.run(own, room, version))
                # Tensors that have been taken are not kept.
                for name in list(room):
                    try:
                        yield name, room.pop(name)
                    except GeneratorExit:
                        self._leave(name)
                        raise

    def close(self) -> None:
        """Close port and watch; all ranks do so between two runs."""
        self._port.close()
        self._watch.close()

    def _leave(self, name: str) -> None:
        """Tell the other ranks, which would wait for this rank until their time is up."""
        with suppress(Stopped):
            self._watch.stop(Verdict((self._rank,), f"rank {self._rank} stopped loading at {name!r}"))

    def _room(self, tensor: LocalTensor) -> torch.Tensor:
        room = torch.empty(tensor.shape, dtype=self._route.dtype, device=self._device)
        if sum(piece.rows * piece.columns for piece in tensor.pieces) < math.prod(tensor.shape):
            room.fill_(torch.nan)
        return room
