"""Sends buffers over NCCL, posted by the program's own thread: NCCL orders the messages between two ranks on a stream
of the pair.

Invariants (tests/unit/runtime/test_nccl_port.py):
- a rank that waits asks NCCL often and the store seldom;
- after a fault `close` does not wait: messages on their way are aborted.
"""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.nccl import POLL_SECONDS

# NCCL frees its communicators in less time, where no message is on its way.
SHUTDOWN_SECONDS = 60.0


class NcclHandle:
    """A message on a stream of NCCL."""

    def __init__(self, work: dist.Work, peer: int) -> None:
        self._work = work
        self._peer = peer

    @property
    def on_its_way(self) -> bool:
        """Tell whether NCCL still works on the message; False for a message that broke."""
        try:
            return not self._work.is_completed()
        except RuntimeError:
            return False

    def done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # orders the current stream after the message; the host does not wait here
        except RuntimeError as error:
            raise LostPeer(self._peer, error) from error
        return True


class NcclPort:
    """A port over NCCL. Both ends of a pair must post the messages between them in the same order."""

    in_order = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self._posted: list[NcclHandle] = []

    def send(self, buffer: torch.Tensor, peer: int) -> NcclHandle:
        return self._kept(NcclHandle(self._group.send([buffer], peer, 0), peer))

    def receive(self, buffer: torch.Tensor, peer: int) -> NcclHandle:
        return self._kept(NcclHandle(self._group.recv([buffer], peer, 0), peer))

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def close(self) -> None:
        # `shutdown` lets messages on their way finish, which never happens after a fault.
        if any(handle.on_its_way for handle in self._posted):
            self._group.abort()
            return
        ending = threading.Thread(target=self._group.shutdown, name="verl-fuse nccl shutdown", daemon=True)
        ending.start()
        ending.join(SHUTDOWN_SECONDS)
        if ending.is_alive():
            raise FuseError(f"NCCL did not free its communicators in {SHUTDOWN_SECONDS:g} s, with nothing on its way")

    def _kept(self, handle: NcclHandle) -> NcclHandle:
        self._posted = [posted for posted in self._posted if posted.on_its_way] + [handle]
        return handle
