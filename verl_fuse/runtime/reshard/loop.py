"""Runs the event loop of a transfer: two messages leave and two arrive at a time, and kept elements are copied while
the loop is idle.

A message that is passed on is packed out of the target tensors once it is unpacked there, so it waits for its own
arrival only. `verl_fuse.reshard.rounds` explains why the loop ends.
"""

import time
from collections import deque
from collections.abc import Sequence

import torch

from verl_fuse.reshard.program import StreamRange, TransferProgram
from verl_fuse.runtime.port import Handle, Port
from verl_fuse.runtime.reshard.holding import HeldTensors
from verl_fuse.runtime.reshard.messages import PackedMessage, Packer, keep
from verl_fuse.runtime.watch import Watch

Buffers = tuple[list[torch.Tensor], list[torch.Tensor]]


class TransferLoop:
    """One run; `holdings` are the rank's tensors in the source and in the target layout, `buffers` the buffers to send
    from and to receive into."""

    def __init__(
        self,
        program: TransferProgram,
        port: Port,
        watch: Watch,
        packer: Packer,
        holdings: tuple[HeldTensors, HeldTensors],
        buffers: Buffers,
    ) -> None:
        self._program, self._port, self._watch, self._packer = program, port, watch, packer
        self._source, self._target = holdings
        self._free_to_send, self._free_to_receive = buffers
        self._leaving: deque[tuple[PackedMessage, torch.Tensor, Handle]] = deque()
        self._arriving: deque[tuple[PackedMessage, torch.Tensor, Handle]] = deque()
        self._arrived: set[tuple[StreamRange, ...]] = set()

    def run(
        self, sends: Sequence[PackedMessage], receives: Sequence[PackedMessage], kept: Sequence[StreamRange]
    ) -> None:
        """Return when everything has left and arrived."""
        self._to_send, self._to_receive, self._to_keep = deque(sends), deque(receives), deque(kept)
        self._watch.runs("the first messages")
        while self._to_send or self._to_receive or self._leaving or self._arriving or self._to_keep:
            if self._step():
                continue
            if self._to_keep:
                keep(self._program, self._to_keep.popleft(), self._source, self._target)
                continue
            peers = sorted(
                {*(p.message.receiver for p, _, _ in self._leaving), *(p.message.sender for p, _, _ in self._arriving)}
            )
            self._watch.wait(self._waiting(), peers, self._poll)
            self._watch.runs("packing and unpacking")

    def _poll(self, seconds: float) -> bool | None:
        """Tell whether a message has got through within `seconds`; the work that follows is not part of the wait."""
        deadline = time.monotonic() + seconds
        while not self._through():
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self._port.pause(left)
        return True

    def _through(self) -> bool:
        return any(posted and posted[0][2].done() for posted in (self._arriving, self._leaving))

    def _step(self) -> bool:
        """Do all work that is possible now; tell whether there was any."""
        return any([self._unpack(), self._receive(), self._retire(), self._send()])

    def _unpack(self) -> bool:
        if not self._arriving or not self._arriving[0][2].done():
            return False
        parcel, buffer, _ = self._arriving.popleft()
        self._packer.unpack(parcel, self._target, buffer)
        self._arrived.add(parcel.message.spans)
        self._free_to_receive.append(buffer)
        return True

    def _receive(self) -> bool:
        if not self._to_receive or not self._free_to_receive or not self._in_turn(self._to_receive[0], self._to_send):
            return False
        parcel, buffer = self._to_receive.popleft(), self._free_to_receive.pop()
        handle = self._port.receive(self._packer.room(parcel, buffer), parcel.message.sender)
        self._arriving.append((parcel, buffer, handle))
        return True

    def _retire(self) -> bool:
        if not self._leaving or not self._leaving[0][2].done():
            return False
        self._free_to_send.append(self._leaving.popleft()[1])
        return True

    def _send(self) -> bool:
        if not self._to_send or not self._free_to_send or not self._in_turn(self._to_send[0], self._to_receive):
            return False
        message = self._to_send[0].message
        if message.relayed and message.spans not in self._arrived:
            return False
        parcel, buffer = self._to_send.popleft(), self._free_to_send.pop()
        packed = self._packer.pack(parcel, self._target if message.relayed else self._source, buffer)
        self._leaving.append((parcel, buffer, self._port.send(packed, message.receiver)))
        return True

    def _in_turn(self, parcel: PackedMessage, others: deque[PackedMessage]) -> bool:
        """Tell whether this parcel may be posted before the first parcel of the other side."""
        if not self._port.in_order or not others:
            return True
        ours, theirs = parcel.message, others[0].message
        return (ours.round, ours.sender) < (theirs.round, theirs.sender)

    def _waiting(self) -> str:
        parts = [
            f"a message from rank {p.message.sender} (round {p.message.round})" for p, _, _ in [*self._arriving][:1]
        ]
        parts += [
            f"a message to rank {p.message.receiver} (round {p.message.round})" for p, _, _ in [*self._leaving][:1]
        ]
        return " and ".join(parts)
