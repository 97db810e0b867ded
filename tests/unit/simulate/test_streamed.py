"""The update in the tail: calls of complete groups on released replicas."""

from dataclasses import replace

import numpy as np
import pytest
from timings import linear_timing, roofline_timing

from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.streamed import StreamedUpdate, streamed_tail
from verl_fuse.simulate.tail import InferenceWork, MigrationCost, migrated, trigger_time, unmigrated
from verl_fuse.simulate.threshold import ThresholdScan, best_threshold

NOTHING = InferenceWork(0.0)
SAMPLES, EACH, REPLICAS = 64, 4, 4
GROUP = np.arange(SAMPLES) // EACH


def begun(seed: int = 0) -> RolloutState:
    """Lengths that differ between groups more than within one."""
    rng = np.random.default_rng(seed)
    usual = rng.lognormal(np.log(200), 1.0, SAMPLES // EACH)[GROUP]
    response = np.clip(usual * rng.lognormal(0, 0.3, SAMPLES), 1, 2000).astype(int)
    requests = Requests.of(np.full(SAMPLES, 100), response)
    return RolloutState.begin(requests, roofline_timing(max_batch=32), round_robin(SAMPLES, REPLICAS))


def moved(threshold: int = 12, survivors: int = 1):
    start = begun()
    time = trigger_time(start.advance(), threshold)
    return migrated(start.advance(time), time, survivors, NOTHING, MigrationCost(0.1))


@pytest.mark.parametrize("when_done", [True, False])
def test_a_call_trains_on_a_complete_group_on_a_released_replica_before_the_end(when_done: bool):
    fused, update = moved(), StreamedUpdate(2e-5, end_seconds=0.5, load_seconds=0.2, when_done=when_done)
    tail = streamed_tail(fused, GROUP, update)
    assert len(tail.replica) > 0
    survivor = int(fused.survivors[0])
    assert survivor not in tail.replica, "it generates to the end"
    assert (tail.start >= fused.release + 0.2).all()
    assert (tail.start < fused.generation_end).all()
    for replica in range(REPLICAS):
        mine = tail.replica == replica
        assert (tail.start[mine][1:] >= tail.end[mine][:-1]).all(), "one call after the other"
    # As many groups are complete when the n-th call begins as there are calls before it, and its own.
    complete = np.sort(np.maximum.reduceat(fused.rollout.finish, np.arange(0, SAMPLES, EACH)))
    assert (np.sort(tail.start) >= complete[: len(tail.start)]).all()


def test_all_work_is_done_once():
    fused, update = moved(), StreamedUpdate(2e-5, 1e-9, end_seconds=0.5)
    tail, whole = streamed_tail(fused, GROUP, update), update.work(fused.rollout.requests).sum()
    called = (tail.end - tail.start).sum()
    assert called + REPLICAS * (tail.left - 0.5) == pytest.approx(whole)
    assert tail.share == pytest.approx(called / whole)
    assert tail.seconds < fused.generation_end + whole / REPLICAS + 0.5, "some of it was hidden"
    assert tail.ended == max(fused.generation_end, tail.end.max())


@pytest.mark.parametrize("changed", [{"dedicated": False}, {"load_seconds": 1e6}])
def test_without_a_device_that_is_free_the_update_follows_generation(changed):
    fused, update = moved(), replace(StreamedUpdate(2e-5, end_seconds=0.5), **changed)
    tail = streamed_tail(fused, GROUP, update)
    assert (len(tail.replica), tail.share) == (0, 0.0)
    assert tail.seconds == pytest.approx(fused.generation_end + update.work(fused.rollout.requests).sum() / 4 + 0.5)


def test_without_a_migration_only_replicas_that_are_done_train():
    through = unmigrated(begun().advance(), NOTHING)
    assert len(streamed_tail(through, GROUP, StreamedUpdate(2e-5, when_done=False)).replica) == 0
    tail = streamed_tail(through, GROUP, StreamedUpdate(2e-5))
    assert 0 < tail.share < 1
    assert (tail.start >= through.rollout.clocks[tail.replica]).all()
    # A replica that never generated is free from the start.
    more = streamed_tail(through, GROUP, StreamedUpdate(2e-5), replicas=REPLICAS + 1)
    assert set(more.replica.tolist()) == {REPLICAS}
    assert more.start.min() < tail.start.min()


def test_a_group_waits_for_its_last_sample():
    # Two groups, dealt out so that each has its short and its long sample on the same replica.
    requests = Requests.of(np.full(4, 10), np.array([10, 100, 100, 400]))
    start = RolloutState.begin(requests, linear_timing(max_batch=4), [np.array([0, 1, 2]), np.array([3])])
    through = unmigrated(start.advance(), NOTHING)
    of_pairs = streamed_tail(through, np.array([0, 0, 1, 1]), StreamedUpdate(1e-6))
    mixed = streamed_tail(through, np.array([0, 1, 1, 0]), StreamedUpdate(1e-6))
    assert of_pairs.start.tolist() == [through.rollout.clocks[0]]
    assert of_pairs.share == pytest.approx(130 / 650)
    assert mixed.share == pytest.approx(220 / 650)
    # What is left is done by both replicas, without the calls' start-up on a released one.
    inferred = streamed_tail(
        through, np.array([0, 0, 1, 1]), StreamedUpdate(1e-6), InferenceWork(1e-6, slice_factor=3.0)
    )
    assert (inferred.end - inferred.start).tolist() == pytest.approx([130e-6 * (1 + 3)])
    assert (inferred.inference_left, inferred.left) == pytest.approx((520e-6 / 2, 520e-6 / 2))


def test_inference_of_a_group_comes_first_on_its_device():
    fused, update = moved(), StreamedUpdate(2e-5, end_seconds=0.5)
    alone, both = (streamed_tail(fused, GROUP, update, inference) for inference in (NOTHING, InferenceWork(1e-5)))
    assert both.share <= alone.share
    assert both.inference_left > 0 == alone.inference_left
    assert both.seconds > alone.seconds


def test_a_streamed_update_alone_makes_the_tail_migrate():
    draws = [begun(seed) for seed in range(2)]
    timing, requests = draws[0].timing, [draw.requests for draw in draws]
    update = StreamedUpdate(2e-4, when_done=False)
    assert best_threshold(requests, REPLICAS, timing, NOTHING).threshold == 0
    chosen = best_threshold(requests, REPLICAS, timing, NOTHING, update=update, groups=[GROUP, GROUP])
    assert chosen.threshold > 0
    assert chosen.seconds < 0.99 * chosen.stock_seconds
    scan = ThresholdScan(draws, NOTHING, MigrationCost(), update, [GROUP, GROUP])
    scan.prepare([chosen.threshold])
    assert scan.seconds(chosen.threshold, chosen.survivors) == chosen.seconds
    shared = replace(update, dedicated=False)
    assert best_threshold(requests, REPLICAS, timing, NOTHING, update=shared, groups=[GROUP, GROUP]).threshold == 0
