"""Connects a rank to the others in a transfer: by a process group of its own, which may join processes of several
worlds.

Invariants (tests/unit/runtime/test_transfer_executor.py):
- messages between two ranks arrive in the order in which they were sent;
- a broken connection is a `LostPeer`, never a wrong message.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.links import MESSAGE_TIMEOUT
from verl_fuse.runtime.reshard.gloo import GlooPort
from verl_fuse.runtime.reshard.nccl import NcclPort

# A receive may be posted long before its message is sent; the watch bounds how long a rank makes no progress.
BACKENDS = ("gloo", "nccl")


class Handle(Protocol):
    """A message on its way."""

    def done(self) -> bool:
        """Tell whether the message is through; LostPeer if it never will be."""
        ...


class Port(Protocol):
    """Sends and receives buffers of bytes. `in_order`: all ranks must post in the order of rounds, and
    of senders within a round."""

    in_order: bool

    def send(self, buffer: torch.Tensor, peer: int) -> Handle:
        """Begin to send a buffer that nobody changes until it is through."""
        ...

    def receive(self, buffer: torch.Tensor, peer: int) -> Handle:
        """Begin to receive into a buffer that nobody reads until it is through."""
        ...

    def pause(self, seconds: float) -> None:
        """Return when a message may have got through, after `seconds` at the latest; the caller asks again."""
        ...

    def close(self) -> None:
        """End the port's threads, once no message is on its way; after a fault the call does not wait: a message on its
        way is aborted, or its thread left behind."""
        ...


def open_port(store: Any, rank: int, size: int, backend: str) -> Port:
    """Join the process group of a transfer: `size` processes call this with the same backend and a store prefix
    that was never used before."""
    if backend not in BACKENDS:
        raise FuseError(f"backend={backend!r}; transfers run on {', '.join(BACKENDS)}")
    if backend == "gloo":
        return GlooPort(dist.ProcessGroupGloo(store, rank, size, MESSAGE_TIMEOUT))
    if not dist.is_nccl_available():
        raise FuseError("backend='nccl'; this torch was built without it")
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = MESSAGE_TIMEOUT
    return NcclPort(dist.ProcessGroupNCCL(store, rank, size, options))  # pyright: ignore[reportAttributeAccessIssue]
