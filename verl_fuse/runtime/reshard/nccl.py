"""Buffers over NCCL, posted by the program's own thread: NCCL orders what passes between two ranks on a stream of the pair."""

import time
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.nccl import POLL_SECONDS


class NcclHandle:
    """A message on a stream of NCCL."""

    def __init__(self, work: dist.Work, peer: int) -> None:
        self._work = work
        self._peer = peer

    def done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # orders the current stream after the message; the host does not wait here
        except RuntimeError as error:
            raise LostPeer(self._peer, error) from error
        return True


class NcclPort:
    """Both ends of a pair must post what passes between them in the same order."""

    in_order = True

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, buffer: torch.Tensor, peer: int) -> NcclHandle:
        return NcclHandle(self._group.send([buffer], peer, 0), peer)

    def receive(self, buffer: torch.Tensor, peer: int) -> NcclHandle:
        return NcclHandle(self._group.recv([buffer], peer, 0), peer)

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def close(self) -> None:
        self._group.shutdown()
