"""A weight sender notices that its receiver died, and never waits longer than the weight sync timeout.

verl sends weights to a rollout worker over a ZeroMQ REQ socket and waits for each answer without a timeout, so a
receiver that dies leaves the training rank waiting for ever. The patch wraps the socket: a waiting socket also watches
the connection, and ends with an error that names the receiver's process as soon as the receiver disconnects, or when
VERL_FUSE_WEIGHT_SYNC_TIMEOUT seconds (default 600) have passed.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse_patches.registry import Patch, around

TIMEOUT_VARIABLE = "VERL_FUSE_WEIGHT_SYNC_TIMEOUT"
# An answer that was sent before the receiver closed its end is still delivered within so many seconds.
_GRACE_SECONDS = 1.0


class WatchedSocket:
    """A bound ZeroMQ REQ socket whose sends and receives end in `seconds`, or as soon as the only peer has gone."""

    def __init__(self, inner: Any, handle: str, seconds: float) -> None:
        import zmq

        self._zmq, self._inner, self._handle, self._seconds = zmq, inner, handle, seconds
        self._monitor = inner.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._peer: str | None = None
        self._gone = False

    def send_pyobj(self, message: object) -> None:
        self._wait(self._zmq.POLLOUT)
        self._inner.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait(self._zmq.POLLIN)
        return self._inner.recv()

    def close(self) -> None:
        self._inner.disable_monitor()
        # No unsent message is worth waiting for at interpreter exit; ZeroMQ would otherwise wait without end.
        self._inner.close(linger=0)

    def _wait(self, flag: int) -> None:
        poller = self._zmq.Poller()
        poller.register(self._inner, flag)
        poller.register(self._monitor, self._zmq.POLLIN)
        end = time.monotonic() + self._seconds
        while (left := end - time.monotonic()) > 0:
            ready = dict(poller.poll(left * 1000))
            # Events come first: the peer can be identified only while connected.
            while self._monitor.poll(0):
                self._read_event()
            if self._inner in ready:
                return
            if self._gone:
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        raise FuseError(f"weight sync over {self._handle}: {self._explain()}")

    def _read_event(self) -> None:
        from zmq.utils.monitor import recv_monitor_message

        event = recv_monitor_message(self._monitor)
        self._gone = event["event"] == self._zmq.EVENT_DISCONNECTED
        if not self._gone:
            self._peer = f"the vLLM worker (pid {_peer_pid(event['value'])})"

    def _explain(self) -> str:
        if self._peer is None:
            return f"no vLLM worker connected within {self._seconds:g} s"
        if self._gone:
            return f"{self._peer} closed the connection before it had all weights: it failed or was killed, see its log"
        return f"{self._peer} did not answer within {self._seconds:g} s"


def _peer_pid(descriptor: int) -> int | str:
    """Return the process at the other end of an accepted Unix-domain socket (Linux SO_PEERCRED)."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        # ZeroMQ has closed the socket already; the next event says that the peer has gone.
        return "unknown"
    return struct.unpack("3i", credentials)[0]


def init_socket(original: Callable[..., None], self: Any) -> None:
    original(self)
    self.socket = WatchedSocket(self.socket, self.zmq_handle, float(os.environ.get(TIMEOUT_VARIABLE, "600")))


PATCH = Patch(
    name="weight_sender_deadline",
    reason="a receiver that dies during a weight sync leaves the sender in recv() for ever",
    upstream="https://github.com/verl-project/verl/pull/7366",
    target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender",
    fingerprints={">=0.9.1,<0.10": "3d4eddd00344fed6"},
    remove_when="verl bounds the sender's waits and reports a dead receiver (the linked pull request)",
    apply=around({"BucketedWeightSender._init_socket": init_socket}),
)
