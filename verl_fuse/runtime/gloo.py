"""Sends messages over gloo: one thread sends and one receives, so that the program's own thread can look for faults
meanwhile.

A gloo wait cannot be asked whether it is over, cannot be woken, and closes the connection when its time is up; so a
thread without a time limit does the wait. gloo carries host memory only: the program's own thread copies tensors of
other devices there and back. Threads are daemons: after a fault they stay blocked in gloo, and the interpreter must not
wait for them.
"""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_fuse.runtime.lost import LostPeer


class GlooHandle:
    """A message that a thread sends out of `host`, or receives into it."""

    def __init__(self, message: torch.Tensor, host: torch.Tensor, peer: int) -> None:
        self.host = host
        self.peer = peer
        self.over = False
        self.error: Exception | None = None
        self._message = message

    def done(self) -> bool:
        # The thread notes an error before it says that it is over.
        if not self.over:
            return False
        if self.error is not None:
            raise LostPeer(self.peer, self.error)
        if self.host is not self._message:
            self._message.copy_(self.host)
            self.host = self._message
        return True


class GlooPort:
    """A port whose sends run one after the other, and its receives too; `members` are the peers by their rank in
    `group`."""

    backend = "gloo"
    in_order = False
    most = math.inf

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._members = members
        self._progress = threading.Event()
        self._queues: dict[str, queue.SimpleQueue[GlooHandle | None]] = {}
        for name, work in (("send", group.send), ("receive", group.recv)):
            self._queues[name] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(self._queues[name], work), name=f"verl-fuse {name}", daemon=True
            )
            thread.start()

    def send(self, message: torch.Tensor, peer: int) -> GlooHandle:
        host = message.cpu()
        return self._post("send", GlooHandle(host, host, peer))

    def receive(self, message: torch.Tensor, peer: int) -> GlooHandle:
        host = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
        return self._post("receive", GlooHandle(message, host, peer))

    def pause(self, seconds: float) -> None:
        self._progress.wait(seconds)
        self._progress.clear()

    def close(self) -> None:
        for handles in self._queues.values():
            handles.put(None)

    def _post(self, name: str, handle: GlooHandle) -> GlooHandle:
        self._queues[name].put(handle)
        return handle

    def _serve(
        self, handles: "queue.SimpleQueue[GlooHandle | None]", work: Callable[[list[torch.Tensor], int, int], Any]
    ) -> None:
        while (handle := handles.get()) is not None:
            try:
                work([handle.host], self._members.index(handle.peer), 0).wait()
            # Whatever it is, the thread serves all later messages too.
            except Exception as error:  # noqa: BLE001
                handle.error = error
            handle.over = True
            self._progress.set()
            del handle  # an idle thread keeps no message
