import threading
import time
import weakref

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.record.spans import Recorder


@pytest.fixture
def spans():
    return []


@pytest.fixture
def lane(spans):
    with Lane("train", Recorder(spans.append), timeout=30.0) as lane:
        yield lane


def test_calls_never_overlap_and_run_in_order(lane):
    running, seen, overlaps = [], [], []

    def work(index):
        overlaps.extend(running)
        running.append(index)
        seen.append((index, threading.current_thread().name))
        running.remove(index)

    for index in range(50):
        lane.submit(lambda index=index: work(index), f"call {index}")
    lane.drain()
    assert [index for index, _ in seen] == list(range(50))
    assert {name for _, name in seen} == {"verl-fuse lane train"}
    assert overlaps == []
    assert lane.queued == 0


def test_a_call_waits_for_everything_submitted_before_and_is_recorded(lane, spans):
    seen = []
    gate = threading.Event()
    lane.submit(lambda: (gate.wait(10), seen.append("submitted")), "micro-group 0")
    assert lane.queued == 1
    gate.set()
    assert lane.call("ref", "inference", lambda: seen.append("called") or 7) == 7
    assert seen == ["submitted", "called"]
    assert [(span.name, span.track, span.category) for span in spans] == [("ref", "lane train", "inference")]


def test_the_first_failure_reaches_the_driver_and_stops_what_is_queued(lane):
    seen = []

    def fail():
        raise ValueError("worker died")

    lane.submit(fail, "micro-group 0")
    lane.submit(lambda: seen.append(1), "micro-group 1")
    with pytest.raises(ValueError, match="worker died"):
        lane.drain()
    with pytest.raises(FuseError, match="lane 'train': a call on its workers failed: worker died"):
        lane.check()
    with pytest.raises(FuseError, match="worker died"):
        lane.call("ref", "inference", lambda: seen.append(2))
    assert seen == []


def test_a_call_that_outlasts_the_timeout_names_lane_and_call(spans):
    gate = threading.Event()
    with Lane("train", Recorder(spans.append), timeout=0.2) as lane:
        with pytest.raises(FuseError, match=r"lane 'train': 'ref' did not finish in 0.2 s"):
            lane.call("ref", "inference", gate.wait)
        gate.set()


def test_an_idle_lane_keeps_nothing_of_its_last_call():
    """Weights of a step are gone from the object store once every slice has taken them over, whether or
    not a lane has more to do."""

    class Buckets:
        """An export of a training rank."""

    class Export:
        """Work that has something to keep."""

        def __call__(self):
            return Buckets()

    with Lane("train", Recorder(lambda span: None), timeout=30.0) as lane:
        export = Export()
        future = lane.submit(export, "export_weights")
        kept = [weakref.ref(future.result(10)), weakref.ref(export)]
        del export, future
        deadline = time.monotonic() + 10
        while any(reference() for reference in kept) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reference() for reference in kept] == [None, None]


def test_a_closed_lane_has_done_everything_and_leaves_no_thread(spans):
    seen = []
    with Lane("closed", Recorder(spans.append), timeout=30.0) as lane:
        for index in range(3):
            lane.submit(lambda index=index: seen.append(index), f"call {index}")
    assert seen == [0, 1, 2]
    assert "verl-fuse lane closed" not in {thread.name for thread in threading.enumerate()}


def test_a_timeout_error_of_the_work_itself_is_not_mistaken_for_the_lane_s(lane):
    def fail():
        raise TimeoutError("inside")

    with pytest.raises(TimeoutError, match="inside"):
        lane.call("ref", "inference", fail)
