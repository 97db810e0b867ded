"""Sends messages over NCCL, all posted by the program's own thread: NCCL orders them on streams of its own, one stream
for each pair of ranks in a group.

The program waits on the host until a message is there before it launches the op that needs it. That costs launch
latency only where the device would be idle anyway, and the wait lets a stuck peer be named.

verl sets CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron on Hopper: the device then takes all streams' work from one queue,
and work whose stream is not free keeps everything behind it from starting. A message behind another message on its
stream would keep the op of the first message waiting. So each stream has one message at a time, and the next is posted
when that one is through.

Invariants (tests/unit/runtime/test_one_queue.py):
- a stream never has more than `POSTED` messages;
- no program hangs on devices with one queue.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.stage import TensorSpec

POLL_SECONDS = 20e-6
# Messages on a stream at a time: with two, a program can hang on devices with one queue.
POSTED = 1


class NcclInbox:
    """An inbox that receives the messages of `specs` from `source`; the next receive is posted when a message is
    taken."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, specs: Sequence[TensorSpec], depth: int, device: torch.device
    ) -> None:
        self._group = group
        self._source = source
        self._ahead = min(depth, POSTED)
        self._device = device
        self._todo = deque(specs)
        self._posted: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._post()

    def take(self, seconds: float, meanwhile: Callable[[], None]) -> torch.Tensor | None:
        message, work = self._posted[0]
        if not _over(work, self._source, seconds, meanwhile):
            return None
        self._posted.popleft()
        work.wait()  # orders the current stream after the message; the host does not wait here
        self._post()
        return message

    def _post(self) -> None:
        while self._todo and len(self._posted) < self._ahead:
            spec = self._todo.popleft()
            message = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            work = dist.irecv(message, self._source, group=self._group)
            assert work is not None, "this rank is in the group"
            self._posted.append((message, work))


class NcclOutbox:
    """An outbox to `target`; a tensor is released when it has left."""

    def __init__(self, group: dist.ProcessGroup, target: int) -> None:
        self._group = group
        self._target = target
        self._todo: deque[torch.Tensor] = deque()
        self._leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def put(self, message: torch.Tensor) -> None:
        self._todo.append(message)
        self.push()

    def push(self) -> None:
        try:
            while self._leaving and self._leaving[0][1].is_completed():
                self._leaving.popleft()
        except RuntimeError as error:
            raise LostPeer(self._target, error) from error
        while self._todo and len(self._leaving) < POSTED:
            message = self._todo.popleft()
            work = dist.isend(message, self._target, group=self._group)
            assert work is not None, "this rank is in the group"
            self._leaving.append((message, work))

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        deadline = time.monotonic() + seconds
        while self._leaving:
            if not _over(self._leaving[0][1], self._target, deadline - time.monotonic(), meanwhile):
                return False
            self.push()
        return True


def _over(work: dist.Work, peer: int, seconds: float, meanwhile: Callable[[], None]) -> bool:
    """Tell whether `work` ends within `seconds`; `meanwhile` is called repeatedly in that time."""
    deadline = time.monotonic() + seconds
    try:
        while not work.is_completed():
            meanwhile()
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
    except RuntimeError as error:
        raise LostPeer(peer, error) from error
    return True
