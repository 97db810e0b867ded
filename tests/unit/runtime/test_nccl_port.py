"""NCCL's port without NCCL: a process group that counts and blocks stands in for it. What NCCL
itself does is not shown here."""

import threading
import time
import weakref
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime import nccl
from verl_fuse.runtime.nccl import NcclPort
from verl_fuse.runtime.reshard.loop import TransferLoop
from verl_fuse.runtime.watch import STORE_POLL_SECONDS, Watch

PEERS = range(2)


class Work:
    """A message that is through once `over` is set; `broken`, it raises."""

    def __init__(self, broken=False):
        self.over, self.broken, self.asked = False, broken, 0

    def is_completed(self):
        self.asked += 1
        if self.broken:
            raise RuntimeError("NCCL communicator was aborted")
        return self.over

    def wait(self):
        assert self.over


class Group:
    """A group that posts given works; `shutdown` blocks while `blocks` is not set."""

    def __init__(self, *works):
        self._works, self.calls, self.blocks = list(works), [], threading.Event()
        self.blocks.set()

    def send(self, buffers, peer, tag):
        return self._works.pop(0)

    recv = send

    def abort(self):
        self.calls.append("abort")

    def shutdown(self):
        self.calls.append("shutdown")
        self.blocks.wait(60)


def test_a_message_that_is_through_holds_no_memory():
    work = Work()
    port = NcclPort(Group(work), PEERS)
    handle = port.receive(None, 1)
    assert not handle.done()
    work.over = True
    assert handle.done()
    kept = weakref.ref(work)
    del work
    assert kept() is None
    assert handle.done()


class CountingStore:
    """A real store, with a count of its requests."""

    def __init__(self, store, counts):
        self._store, self._counts = store, counts

    def clone(self):
        # The guard's thread asks on its own.
        return CountingStore(self._store.clone(), Counter())

    def __getattr__(self, name):
        def call(*args):
            self._counts[name] += 1
            return getattr(self._store, name)(*args)

        return call


def waiting_loop(port):
    """A transfer in which one message is to come."""
    loop = TransferLoop(None, port, None, None, (None, None), ([], []))  # type: ignore[arg-type]
    loop._arriving.append((SimpleNamespace(), None, port.receive(None, 1)))  # type: ignore[arg-type]
    return loop


def test_a_rank_that_waits_asks_the_store_a_few_times_a_second_and_nccl_often():
    work, counts = Work(), Counter()
    store = CountingStore(dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30)), counts)
    loop = waiting_loop(NcclPort(Group(work), PEERS))
    seconds = 5 * STORE_POLL_SECONDS
    with Watch("nccl", store, 0, [0, 1], timeout=30) as watch:
        timer = threading.Timer(seconds, lambda: setattr(work, "over", True))
        before, begun = sum(counts.values()), time.monotonic()
        timer.start()
        assert watch.wait("a message", [1], loop._poll)
        waited, asked = time.monotonic() - begun, sum(counts.values()) - before
        timer.join()
    assert waited >= seconds
    # One look for a verdict each time its share of the wait is over, and saying what it waits for.
    assert asked <= waited / STORE_POLL_SECONDS + 3, counts
    assert work.asked > 100


def test_a_port_with_nothing_on_its_way_frees_nccl_in_order():
    done, broken = Work(), Work(broken=True)
    port = NcclPort(group := Group(done, broken), PEERS)
    port.send(None, 1)  # type: ignore[arg-type]
    port.receive(None, 1)  # type: ignore[arg-type]
    done.over = True
    port.close()
    assert group.calls == ["shutdown"]


def test_after_a_fault_what_is_on_its_way_is_aborted_and_nobody_is_waited_for():
    port = NcclPort(group := Group(Work()), PEERS)
    group.blocks.clear()
    port.receive(None, 1)  # type: ignore[arg-type]
    begun = time.monotonic()
    port.close()
    assert group.calls == ["abort"]
    assert time.monotonic() - begun < 5


def test_a_shutdown_that_hangs_with_nothing_on_its_way_is_said(monkeypatch):
    monkeypatch.setattr(nccl, "SHUTDOWN_SECONDS", 0.2)
    port = NcclPort(group := Group(), PEERS)
    group.blocks.clear()
    with pytest.raises(FuseError, match=r"NCCL did not free its communicators in 0\.2 s, with nothing on its way"):
        port.close()
    group.blocks.set()
