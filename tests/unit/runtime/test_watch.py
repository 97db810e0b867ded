"""The invariants in the docstring of verl_fuse/runtime/watch.py that one process can show;
test_faults.py shows the rest."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.blame import Verdict
from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.watch import Stopped, Watch


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))


@pytest.fixture
def watches(store: dist.TCPStore, request: pytest.FixtureRequest) -> Iterator[tuple[Watch, Watch]]:
    """Both ranks of a group of two, in this process."""
    with (
        Watch(request.node.name, store, 0, (0, 1), 1.0) as first,
        Watch(request.node.name, store, 1, (0, 1), 1.0) as other,
    ):
        yield first, other


def never(seconds: float) -> None:
    time.sleep(seconds)


def test_what_is_there_is_returned_at_once(watches: tuple[Watch, Watch]):
    assert watches[0].wait("0F0", (1,), lambda seconds: "here") == "here"


def test_a_wait_ends_with_the_timeout_and_names_rank_op_and_peer(watches: tuple[Watch, Watch]):
    with watches[1].program():
        watches[1].runs("0F7")
        begun = time.monotonic()
        with pytest.raises(Stopped) as caught, watches[0].program():
            watches[0].wait("0F3", (1,), never)
        assert 1.0 <= time.monotonic() - begun < 10.0
    said = r"rank 0 waited [\d.]+ s for 0F3 from rank 1: rank 1 has been running 0F7 for [\d.]+ s"
    assert re.search(said, str(caught.value)), caught.value


def test_a_wait_ends_soon_after_a_verdict(watches: tuple[Watch, Watch]):
    watches[1].stop(Verdict((1,), "rank 1 is to blame"))
    begun = time.monotonic()
    with pytest.raises(Stopped) as caught:
        watches[0].wait("0F3", (1,), never)
    assert time.monotonic() - begun < 1.0, "not when its own time is up"
    assert str(caught.value) == "pipeline program stopped: rank 1 is to blame (this is rank 0, waiting for 0F3)"


def test_the_first_verdict_stands_and_no_program_starts_after_it(watches: tuple[Watch, Watch]):
    watches[1].stop(Verdict((1,), "first"))
    assert "first" in str(watches[0].stop(Verdict((0,), "second")))
    with pytest.raises(Stopped, match="first"), watches[0].program():
        raise AssertionError("no program runs after a verdict")


def test_a_failure_is_everybodys_verdict_and_is_raised_unchanged(watches: tuple[Watch, Watch]):
    error = KeyError("layer 3")

    def fail() -> None:
        with watches[1].program():
            watches[1].runs("1B2")
            raise error

    with pytest.raises(KeyError) as caught:
        fail()
    assert caught.value is error
    with pytest.raises(Stopped, match="rank 1 failed at 1B2: KeyError: 'layer 3'"):
        watches[0].wait("0F3", (1,), never)


def test_a_lost_peer_is_named(watches: tuple[Watch, Watch]):
    def broken(seconds: float) -> None:
        raise LostPeer(1, RuntimeError("connection reset"))

    with pytest.raises(Stopped, match="rank 1 closed its connection to rank 0; it has been running what comes before"):
        watches[0].wait("0F3", (1,), broken)


def test_a_peer_lost_while_this_rank_works_is_named_not_this_rank(watches: tuple[Watch, Watch]):
    watches[1].runs("0F7")
    with pytest.raises(Stopped) as caught, watches[0].program():
        raise LostPeer(1, RuntimeError("connection reset"))
    assert "rank 1 closed its connection to rank 0; it has been running 0F7" in str(caught.value)
    with pytest.raises(Stopped, match="rank 1 closed its connection to rank 0"), watches[1].program():
        pass


def test_ranks_gather_what_each_gives_and_forget_it(watches: tuple[Watch, Watch], store: dist.TCPStore):
    def run(watch: Watch) -> dict[int, str]:
        with watch.program():
            found = watch.gather("agreement", f"from {watch.rank}")
            watch.forget("agreement")
        return found

    with ThreadPoolExecutor(2) as threads:
        before = None
        for _ in range(3):
            assert list(threads.map(run, watches)) == [{0: "from 0", 1: "from 1"}] * 2
            before = before or store.num_keys()
            assert store.num_keys() == before


def test_a_name_is_used_once(store: dist.TCPStore):
    with Watch("twice", store, 0, (0, 1), 1.0), pytest.raises(FuseError, match="opened on rank 0 before"):
        Watch("twice", store, 0, (0, 1), 1.0)


@pytest.mark.parametrize(("rank", "timeout"), [(2, 1.0), (0, 0.0)])
def test_a_stranger_or_no_time_is_refused(store: dist.TCPStore, rank: int, timeout: float):
    with pytest.raises(FuseError, match="needs > 0, and a member"):
        Watch("refused", store, rank, (0, 1), timeout)
