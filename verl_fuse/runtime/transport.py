"""Carries messages of one pipeline in one direction, in the order of its micro-batches.

Invariants (tests/unit/runtime/test_transport.py):
- messages are taken in the order in which they were put;
- a receive is posted before its message is asked for: at most `depth` buffers per direction are posted or
  hold an untaken message;
- `put` never blocks; a message is kept until it has left;
- a broken connection is a `LostPeer`, never a wrong message.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from verl_fuse.runtime.port import Handle, Port
from verl_fuse.runtime.stage import TensorSpec


class Inbox:
    """The end at which the messages of `specs` arrive from `source`, at most `depth` ahead of `take`."""

    def __init__(self, port: Port, source: int, specs: Sequence[TensorSpec], depth: int, device: torch.device) -> None:
        self.source, self._port, self._device = source, port, device
        self._ahead = min(depth, port.most)
        self._todo = deque(specs)
        self._posted: deque[tuple[torch.Tensor, Handle]] = deque()
        self._post()

    def take(self, seconds: float, meanwhile: Callable[[], None]) -> torch.Tensor | None:
        """Return the next message, or None if it has not come within `seconds`, in which `meanwhile` lets messages
        leave; LostPeer when it never will come."""
        if not self._posted or not _over(self._port, self._posted[0][1], seconds, meanwhile):
            return None
        message, _ = self._posted.popleft()
        self._post()
        return message

    def _post(self) -> None:
        while self._todo and len(self._posted) < self._ahead:
            spec = self._todo.popleft()
            message = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            self._posted.append((message, self._port.receive(message, self.source)))


class Outbox:
    """The end at which messages leave to `target`; a tensor is released when it has left."""

    def __init__(self, port: Port, target: int) -> None:
        self.target, self._port = target, port
        self._todo: deque[torch.Tensor] = deque()
        self._leaving: deque[tuple[torch.Tensor, Handle]] = deque()

    def put(self, message: torch.Tensor) -> None:
        """Send a tensor that no code changes from here on."""
        self._todo.append(message)
        self.push()

    def push(self) -> None:
        """Let messages leave that wait for others to leave; never blocks. Called wherever the program waits."""
        while self._leaving and self._leaving[0][1].done():
            self._leaving.popleft()
        while self._todo and len(self._leaving) < self._port.most:
            message = self._todo.popleft()
            self._leaving.append((message, self._port.send(message, self.target)))

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        """Tell whether all messages have left within `seconds`, in which `meanwhile` lets messages leave that others
        wait for; LostPeer when they never will."""
        deadline = time.monotonic() + seconds
        while self._leaving:
            if not _over(self._port, self._leaving[0][1], deadline - time.monotonic(), meanwhile):
                return False
            self.push()
        return True


def _over(port: Port, handle: Handle, seconds: float, meanwhile: Callable[[], None]) -> bool:
    """Tell whether a message gets through within `seconds`; `meanwhile` is called repeatedly in that time."""
    deadline = time.monotonic() + seconds
    while not handle.done():
        meanwhile()
        if (left := deadline - time.monotonic()) <= 0:
            return False
        port.pause(left)
    return True
