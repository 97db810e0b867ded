"""Runs one rank's part of a transfer program.

Invariants (tests/unit/runtime/test_transfer_executor.py, test_transfer_faults.py):
- after a run every rank's target tensors equal the target layout's, bitwise; source tensors are only read;
- besides both layouts' tensors a rank needs at most one bucket: two messages leaving, two arriving; of weights in host
  memory a part of a message besides, in their own type;
- ranks that disagree about program, version or types stop before the first write;
- no wait without progress is longer than the watch's timeout; every rank's error names the same culprit;
- `held_version` has a version only when all ranks have received everything.
"""

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from verl_fuse.errors import FuseError
from verl_fuse.reshard.program import TransferProgram
from verl_fuse.runtime.blame import Verdict
from verl_fuse.runtime.port import Port
from verl_fuse.runtime.reshard.holding import HeldTensors, check_apart
from verl_fuse.runtime.reshard.loop import TransferLoop
from verl_fuse.runtime.reshard.messages import Packer, buffer_bytes, parcels
from verl_fuse.runtime.reshard.version import WeightVersion
from verl_fuse.runtime.watch import Watch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TransferReport:
    """Figures of one rank: bytes it sent and received, seconds from agreement to the end on all ranks, bytes of
    buffers it needed at most."""

    version: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    extra_bytes: int


class Transfer:
    """One rank's part, looked up once; runs any number of times. `dtype` is the type of elements on the way, `device`
    packs messages."""

    def __init__(
        self,
        program: TransferProgram,
        rank: int,
        port: Port,
        watch: Watch,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        checksums: bool = False,
    ) -> None:
        if dtype.itemsize != program.item_bytes:
            raise FuseError(f"dtype={dtype} on the way; the program is for elements of {program.item_bytes} bytes")
        if list(watch.ranks) != list(range(len(program.nodes))) or watch.rank != rank:
            raise FuseError(
                f"rank {rank}: its watch is rank {watch.rank} of {list(watch.ranks)}; needs 0 to "
                f"{len(program.nodes) - 1}"
            )
        self._program, self._rank, self._port, self._watch = program, rank, port, watch
        self._dtype, self._device = dtype, torch.device(device)
        self._checksums = checksums
        self._sends = parcels(program, program.sends(rank))
        self._receives = parcels(program, program.receives(rank))
        self._kept = program.kept(rank)
        self._layouts = tuple(side.tensors(program.weights, rank) for side in (program.source, program.target))
        self._sizes = tuple(buffer_bytes(program, found, checksums) for found in (self._sends, self._receives))

    def run(
        self, source: Tensors, target: Tensors, version: int | None, held_version: WeightVersion | None = None
    ) -> TransferReport:
        """Bring the target tensors to `version` of the source's. Ranks without source tensors may give None: they take
        the version that the others agree on.

        `held_version` belongs to the target tensors. After an error neither port nor watch is of further use;
        source tensors are intact.
        """
        weights, rank, program = self._program.weights, self._rank, self._program
        with self._watch.program():
            old = HeldTensors(weights, self._layouts[0], f"rank {rank} of {program.source}", source)
            new = HeldTensors(weights, self._layouts[1], f"rank {rank} of {program.target}", target)
            check_apart(old, new)
            agreed = self._agree(version, old, new)
            begun = time.monotonic()
            with held_version.writing(agreed) if held_version else nullcontext():
                loop = TransferLoop(
                    program,
                    self._port,
                    self._watch,
                    Packer(self._dtype, self._checksums),
                    (old, new),
                    self._buffers(),
                )
                loop.run(self._sends, self._receives, self._kept)
                self._watch.gather("completion", "")
            seconds = time.monotonic() - begun
        sent, received = (
            sum(parcel.elements for parcel in found) * program.item_bytes for found in (self._sends, self._receives)
        )
        return TransferReport(agreed, sent, received, seconds, 2 * sum(self._sizes))

    def _buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return two buffers to send and two to receive."""
        sends, receives = (
            [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)] for size in self._sizes
        )
        return sends, receives

    def _agree(self, version: int | None, old: HeldTensors, new: HeldTensors) -> int:
        """Return the version that all ranks agree on, after comparing their programs."""
        offer = json.dumps([self._program.digest, str(self._dtype), self._checksums, version, old.types, new.types])
        offers = {rank: json.loads(text) for rank, text in self._watch.gather("agreement", offer).items()}
        self._watch.forget("agreement", "completion")
        for place, what in enumerate(("programs", "types on the way", "use of checksums", "versions")):
            said: dict[str, list[int]] = {}
            for rank, each in offers.items():
                if each[place] is not None:
                    said.setdefault(str(each[place]), []).append(rank)
            if len(said) != 1:
                parts = " against ".join(f"{value[:12]} on ranks {ranks}" for value, ranks in said.items()) or "none"
                culprits = min(said.values(), key=len, default=list(self._watch.ranks))
                raise self._watch.stop(Verdict(tuple(culprits), f"ranks have different {what}: {parts}"))
        sides = [sorted({name for each in offers.values() for name in each[place]}) for place in (4, 5)]
        if not any(all(_fits(getattr(torch, name), self._dtype) for name in names) for names in sides):
            text = f"{self._dtype} on the way loses bits of {', '.join(sides[0])} that {', '.join(sides[1])} can hold"
            raise self._watch.stop(Verdict(self._watch.ranks, text))
        return next(each[3] for each in offers.values() if each[3] is not None)


def _fits(dtype: torch.dtype, into: torch.dtype) -> bool:
    """Tell whether every value of one type is a value of the other."""
    return torch.promote_types(dtype, into) == into
