"""Sends messages over gloo: one thread per direction waits, so that the program's own thread can look for faults
meanwhile.

A gloo wait cannot be asked whether it is over, cannot be woken, and closes the connection when its time is up; so a
thread without a time limit does the wait. gloo carries host memory only: tensors of other devices are copied there and
back.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.stage import TensorSpec


class GlooInbox:
    """An inbox that receives the messages of `specs` from `source`, at most `depth` ahead of `take`."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, specs: Sequence[TensorSpec], depth: int, device: torch.device
    ) -> None:
        self._source = source
        self._device = device
        self._buffers = threading.Semaphore(depth)
        self._arrived: queue.SimpleQueue[torch.Tensor | RuntimeError] = queue.SimpleQueue()
        _start(self._receive, group, specs)

    def take(self, seconds: float, meanwhile: Callable[[], None]) -> torch.Tensor | None:
        # Threads of their own let messages leave.
        try:
            message = self._arrived.get(timeout=seconds) if seconds > 0 else self._arrived.get_nowait()
        except queue.Empty:
            return None
        if isinstance(message, RuntimeError):
            raise LostPeer(self._source, message)
        self._buffers.release()
        return message.to(self._device)

    def _receive(self, group: dist.ProcessGroup, specs: Sequence[TensorSpec]) -> None:
        for spec in specs:
            self._buffers.acquire()
            message = torch.empty(spec.shape, dtype=spec.dtype)
            try:
                dist.recv(message, self._source, group=group)
            except RuntimeError as error:
                self._arrived.put(error)
                return
            self._arrived.put(message)


class GlooOutbox:
    """An outbox to `target`, which sends one message after the other."""

    def __init__(self, group: dist.ProcessGroup, target: int) -> None:
        self._target = target
        self._queue: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._error: RuntimeError | None = None
        self._thread = _start(self._send, group)
        self._closed = False

    def put(self, message: torch.Tensor) -> None:
        self._queue.put(message.cpu())

    def push(self) -> None:
        """Do nothing: the outbox's thread sends."""

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        if not self._closed:
            self._queue.put(None)
            self._closed = True
        self._thread.join(seconds)
        if self._error is not None:
            raise LostPeer(self._target, self._error)
        return not self._thread.is_alive()

    def _send(self, group: dist.ProcessGroup) -> None:
        while (message := self._queue.get()) is not None:
            try:
                dist.send(message, self._target, group=group)
            except RuntimeError as error:
                self._error = error
                return


def _start(target, *args) -> threading.Thread:
    """Start a daemon thread: after a fault it stays blocked in gloo, and the interpreter must not wait for it."""
    thread = threading.Thread(target=target, args=args, name="verl-fuse gloo", daemon=True)
    thread.start()
    return thread
