"""Carries messages of one pipeline in one direction, in the order of its micro-batches.

Invariants (tests/unit/runtime/test_transport.py):
- messages are taken in the order in which they were put;
- a receive is posted before its message is asked for: at most `depth` buffers per direction are posted or
  hold an untaken message;
- `put` never blocks; a message is kept until it has left;
- a broken connection is a `LostPeer`, never a wrong message.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from verl_fuse.errors import FuseError
from verl_fuse.runtime.gloo import GlooInbox, GlooOutbox
from verl_fuse.runtime.links import Link
from verl_fuse.runtime.nccl import NcclInbox, NcclOutbox
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse.spec.schedule import OpKind

Box = TypeVar("Box")


class Inbox(Protocol):
    """The end at which messages arrive."""

    def take(self, seconds: float, meanwhile: Callable[[], None]) -> torch.Tensor | None:
        """Return the next message, or None if it has not come within `seconds`, in which `meanwhile` lets messages
        leave; LostPeer when it never will come."""
        ...


class Outbox(Protocol):
    """The end at which messages leave."""

    def put(self, message: torch.Tensor) -> None:
        """Send a tensor that no code changes from here on."""
        ...

    def push(self) -> None:
        """Let messages leave that wait for others to leave; never blocks. Called wherever the program waits."""
        ...

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        """Tell whether all messages have left within `seconds`, in which `meanwhile` lets messages leave that others
        wait for; LostPeer when they never will. No message is put afterwards."""
        ...


def open_inbox(link: Link, kind: OpKind, specs: Sequence[TensorSpec], depth: int, device: torch.device) -> Inbox:
    """Return the inbox of one direction to this rank, whose messages have the given specs."""
    source, _ = link.neighbours(kind)
    assert source is not None, "the first stage of a direction receives nothing"
    return _box(link, device, GlooInbox, NcclInbox)(link.groups[kind], source, specs, depth, device)


def open_outbox(link: Link, kind: OpKind, device: torch.device) -> Outbox:
    """Return the outbox of one direction from this rank."""
    _, target = link.neighbours(kind)
    assert target is not None, "the last stage of a direction sends nothing"
    return _box(link, device, GlooOutbox, NcclOutbox)(link.groups[kind], target)


def _box(link: Link, device: torch.device, gloo: Box, nccl: Box) -> Box:
    backend = link.backend(device)
    if backend not in ("gloo", "nccl"):
        raise FuseError(f"backend={backend!r} for {device.type}: pipelines run on gloo and nccl")
    return gloo if backend == "gloo" else nccl
