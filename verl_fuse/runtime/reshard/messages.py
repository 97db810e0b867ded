"""Packs messages out of a rank's tensors and unpacks them into its tensors, converting the type on the way.

Invariant (tests/unit/runtime/test_transfer_executor.py): elements of a message that are packed, sent and unpacked are
bitwise the sender's wherever the type on the way can hold them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_fuse.errors import FuseError
from verl_fuse.reshard.program import Message, StreamRange, TransferProgram
from verl_fuse.reshard.rectangles import Rectangle, rectangles
from verl_fuse.runtime.reshard.checksum import CHECKSUM_BYTES, checksum
from verl_fuse.runtime.reshard.holding import HeldTensors


@dataclass(frozen=True)
class PackedMessage:
    """A message as the rectangles it consists of, each with its place in the message."""

    message: Message
    parts: tuple[tuple[int, Rectangle], ...]
    elements: int


def parcels(program: TransferProgram, messages: Sequence[Message]) -> tuple[PackedMessage, ...]:
    """Return the values that a rank looks up once for all runs."""
    return tuple(_parcel(program, message) for message in messages)


def _parcel(program: TransferProgram, message: Message) -> PackedMessage:
    parts, elements = [], 0
    for span in message.spans:
        parts += [(elements + part.at, part) for part in rectangles(program.streams, span)]
        elements += span.high - span.low
    return PackedMessage(message, tuple(parts), elements)


def buffer_bytes(program: TransferProgram, found: Sequence[PackedMessage], checksums: bool) -> int:
    """Return the size of a buffer that has room for any of the parcels."""
    longest = max((parcel.elements for parcel in found), default=0)
    return longest * program.item_bytes + (CHECKSUM_BYTES if checksums and found else 0)


class Packer:
    """Copies between buffers of bytes and a rank's holdings; elements are `dtype` on the way."""

    def __init__(self, dtype: torch.dtype, checksums: bool) -> None:
        self._dtype = dtype
        self._checksums = checksums

    def pack(self, parcel: PackedMessage, holding: HeldTensors, buffer: torch.Tensor) -> torch.Tensor:
        """Fill a buffer; return the part to be sent."""
        size = parcel.elements * self._dtype.itemsize
        wire = buffer[:size].view(self._dtype)
        for part, view in self._views(parcel, holding, wire):
            part.copy_(_beside(view, part))
        if not self._checksums:
            return buffer[:size]
        buffer[size : size + CHECKSUM_BYTES] = checksum(buffer[:size])
        return buffer[: size + CHECKSUM_BYTES]

    def room(self, parcel: PackedMessage, buffer: torch.Tensor) -> torch.Tensor:
        """Return the part of a buffer in which a parcel arrives."""
        return buffer[: parcel.elements * self._dtype.itemsize + (CHECKSUM_BYTES if self._checksums else 0)]

    def unpack(self, parcel: PackedMessage, holding: HeldTensors, buffer: torch.Tensor) -> None:
        """Write an arrived message into the tensors; a FuseError names a message with a wrong checksum, before any
        element is written."""
        size = parcel.elements * self._dtype.itemsize
        if self._checksums and not torch.equal(buffer[size : size + CHECKSUM_BYTES], checksum(buffer[:size])):
            message = parcel.message
            raise FuseError(
                f"message of round {message.round} from rank {message.sender} to rank {message.receiver}: wrong "
                "checksum"
            )
        for part, view in self._views(parcel, holding, buffer[:size].view(self._dtype)):
            view.copy_(part)

    def _views(
        self, parcel: PackedMessage, holding: HeldTensors, wire: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield matching parts of a message and of the rank's tensors."""
        for at, rectangle in parcel.parts:
            whole = wire[at : at + rectangle.elements].view(rectangle.rows, rectangle.columns)
            for row, column, view in holding.views(rectangle):
                yield whole[row : row + view.shape[0], column : column + view.shape[1]], view


def keep(program: TransferProgram, span: StreamRange, source: HeldTensors, target: HeldTensors) -> None:
    """Copy elements that a rank holds already from its old tensors into its new tensors."""
    for rectangle in rectangles(program.streams, span):
        for row, column, old in source.views(rectangle):
            part = Rectangle(
                rectangle.parameter, rectangle.row + row, old.shape[0], rectangle.column + column, old.shape[1], 0
            )
            for below, beside, new in target.views(part):
                view = old[below : below + new.shape[0], beside : beside + new.shape[1]]
                if new.data_ptr() != view.data_ptr():
                    new.copy_(_beside(view, new))


def _beside(view: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the view on another tensor's device, in its own dtype: a copy from the host that changes both casts there,
    and waits."""
    if view.device == other.device:
        return view
    # A copy to the host is read at once.
    return view.to(other.device, non_blocking=other.device.type != "cpu")
