"""Sends buffers over gloo: one thread sends and one receives, because a gloo wait cannot be asked whether it is over.

gloo carries host memory only: buffers of other devices are copied there and back. Threads are daemons: after a fault
they stay blocked in gloo.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from verl_fuse.runtime.lost import LostPeer


class GlooHandle:
    """A buffer that a thread works on."""

    def __init__(self, buffer: torch.Tensor, peer: int) -> None:
        self.buffer = buffer
        self.peer = peer
        self.over = False
        self.error: RuntimeError | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise LostPeer(self.peer, self.error)
        return self.over


class GlooPort:
    """A port whose sends run one after the other, and its receives too."""

    in_order = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._progress: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._queues: dict[str, queue.SimpleQueue[GlooHandle | None]] = {}
        for name, work in (("send", self._send), ("receive", self._receive)):
            self._queues[name] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(self._queues[name], work), name=f"verl-fuse {name}", daemon=True
            )
            thread.start()

    def send(self, buffer: torch.Tensor, peer: int) -> GlooHandle:
        return self._post("send", buffer, peer)

    def receive(self, buffer: torch.Tensor, peer: int) -> GlooHandle:
        return self._post("receive", buffer, peer)

    def pause(self, seconds: float) -> None:
        try:
            self._progress.get(timeout=seconds)
        except queue.Empty:
            return

    def close(self) -> None:
        for handles in self._queues.values():
            handles.put(None)

    def _post(self, name: str, buffer: torch.Tensor, peer: int) -> GlooHandle:
        handle = GlooHandle(buffer, peer)
        self._queues[name].put(handle)
        return handle

    def _serve(
        self, handles: "queue.SimpleQueue[GlooHandle | None]", work: Callable[[torch.Tensor, int], None]
    ) -> None:
        while (handle := handles.get()) is not None:
            try:
                work(handle.buffer, handle.peer)
            except RuntimeError as error:
                handle.error = error
            handle.over = True
            self._progress.put(None)

    def _send(self, buffer: torch.Tensor, peer: int) -> None:
        self._group.send([buffer.cpu()], peer, 0).wait()

    def _receive(self, buffer: torch.Tensor, peer: int) -> None:
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        self._group.recv([host], peer, 0).wait()
        if host is not buffer:
            buffer.copy_(host)
