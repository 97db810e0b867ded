"""Sends messages over NCCL, all posted by the program's own thread: NCCL orders them on streams of its own, one stream
for each pair of ranks in a group.

The program waits on the host until a message is there before it launches the op that needs it. That costs launch
latency only where the device would be idle anyway, and the wait lets a stuck peer be named.

verl sets CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron on Hopper: the device then takes all streams' work from one queue,
and work whose stream is not free keeps everything behind it from starting. A message behind another message on its
stream would keep the op of the first message waiting. So in a pipeline each stream has one message at a time, and the
next is posted when that one is through.

Invariants (tests/unit/runtime/test_nccl_port.py, test_one_queue.py):
- a rank that waits asks NCCL often and the store seldom;
- after a fault `close` does not wait: messages on their way are aborted;
- no pipeline hangs on devices with one queue.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.lost import LostPeer

POLL_SECONDS = 20e-6
# NCCL frees its communicators in less time, where no message is on its way.
SHUTDOWN_SECONDS = 60.0


class NcclHandle:
    """A message on a stream of NCCL."""

    def __init__(self, work: dist.Work, peer: int) -> None:
        # None once the message is through: a work holds the memory of its message.
        self._work: dist.Work | None = work
        self._peer = peer

    @property
    def on_its_way(self) -> bool:
        """Tell whether NCCL still works on the message; False for a message that broke."""
        try:
            return self._work is not None and not self._work.is_completed()
        except RuntimeError:
            return False

    def done(self) -> bool:
        if self._work is None:
            return True
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # orders the current stream after the message; the host does not wait here
        except RuntimeError as error:
            raise LostPeer(self._peer, error) from error
        self._work = None
        return True


class NcclPort:
    """A port over NCCL; `members` are the peers by their rank in `group`. Both ends of a pair must post the messages
    between them in the same order."""

    backend = "nccl"
    in_order = True
    # With two, a pipeline can hang on devices with one queue.
    most = 1.0

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._group = group
        self._members = members
        self._posted: list[NcclHandle] = []

    def send(self, message: torch.Tensor, peer: int) -> NcclHandle:
        return self._kept(NcclHandle(self._group.send([message], self._members.index(peer), 0), peer))

    def receive(self, message: torch.Tensor, peer: int) -> NcclHandle:
        return self._kept(NcclHandle(self._group.recv([message], self._members.index(peer), 0), peer))

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
