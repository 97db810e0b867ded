"""Migration of the tail and inference on the freed replicas."""

from dataclasses import replace

import numpy as np
import pytest
from timings import linear_timing, roofline_timing

from verl_fuse.errors import FuseError
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.tail import (
    InferenceWork,
    MigrationCost,
    inference_end,
    least_survivors,
    migrated,
    trigger_time,
    unmigrated,
)

NOTHING = InferenceWork(0.0)


def begin(seed: int = 0, count: int = 64, replicas: int = 4, timing=None) -> RolloutState:
    rng = np.random.default_rng(seed)
    response = np.clip(rng.lognormal(np.log(200), 1.0, count).astype(int), 1, 2000)
    timing = timing or roofline_timing(max_batch=32)
    return RolloutState.begin(Requests.of(np.full(count, 100), response), timing, round_robin(count, replicas))


def paused(threshold: int, **options) -> tuple[float, RolloutState]:
    begun = begin(**options)
    time = trigger_time(begun.advance(), threshold)
    return time, begun.advance(time)


def test_the_trigger_leaves_as_many_as_the_threshold():
    through = begin().advance()
    assert (through.finish > trigger_time(through, 10)).sum() == 10
    assert trigger_time(through, 0) == through.seconds


def test_stock_infers_after_generation_on_all_replicas():
    through = begin().advance()
    result = unmigrated(through, InferenceWork(per_token=1e-3))
    assert result.generation_end == through.seconds
    assert result.seconds == pytest.approx(through.seconds + 1e-3 * through.requests.tokens.sum() / 4)


@pytest.mark.parametrize("threshold", [1, 5, 20, 60])
@pytest.mark.parametrize("survivors", [1, 2, 3])
def test_every_request_finishes_once(threshold: int, survivors: int):
    time, rollout = paused(threshold)
    result = migrated(rollout, time, survivors, InferenceWork(1e-3), MigrationCost(0.1))
    assert np.isfinite(result.rollout.finish).all()
    assert (result.rollout.done == result.rollout.requests.response).all()
    before = np.isfinite(rollout.finish)
    assert (result.rollout.finish[before] == rollout.finish[before]).all()
    assert (result.rollout.finish[~before] >= time).all()
    assert len(result.survivors) == survivors


def test_inference_begins_once_the_last_freed_replica_has_stopped_and_loaded():
    # A decode step of 1.02 s or more is under way on each replica, and ends at times of its own.
    requests = Requests.of(np.array([10, 10, 90, 50]), np.array([3, 60, 60, 60]))
    begun = RolloutState.begin(requests, linear_timing(max_batch=4), [np.array([n]) for n in range(4)])
    time = trigger_time(begun.advance(), 3)
    state = begun.advance(time)
    result = migrated(state, time, 1, InferenceWork(1e-3, load_seconds=0.3), MigrationCost())
    freed = [replica for replica in range(4) if replica not in result.survivors]
    assert len({float(state.clocks[replica]) for replica in freed}) > 1
    assert result.release == pytest.approx(max(time, *(state.clocks[replica] for replica in freed)) + 0.3)


def test_survivors_are_those_with_most_left():
    time, rollout = paused(20)
    left = np.bincount(rollout.replica_of[np.isnan(rollout.finish)], minlength=4)
    result = migrated(rollout, time, 2, NOTHING, MigrationCost())
    assert left[result.survivors].sum() == np.sort(left)[-2:].sum()
    assert result.moved == left.sum() - left[result.survivors].sum()
    home = result.rollout.replica_of[np.isnan(rollout.finish)]
    assert set(home.tolist()) == set(result.survivors.tolist())
    loads = np.bincount(home, minlength=4)[result.survivors]
    assert loads.max() - loads.min() <= 1


def test_moved_requests_prefill_what_they_had_or_receive_it():
    # A request finishes with its first token and triggers the move of the one that is alone on its replica.
    requests = Requests.of(np.array([10, 10, 10]), np.array([50, 40, 1]))
    begun = RolloutState.begin(requests, linear_timing(max_batch=4), [np.array([0, 2]), np.array([1])])
    time = trigger_time(begun.advance(), 2)
    state = begun.advance(time)
    assert state.done.tolist() == [1, 2, 1]
    prefilled = migrated(state, time, 1, NOTHING, MigrationCost(0.0))
    received = migrated(state, time, 1, NOTHING, MigrationCost(0.0, seconds_per_token=0.0))
    assert prefilled.survivors.tolist() == received.survivors.tolist() == [1]
    assert prefilled.moved == 1
    # The prefill of 11 tokens takes 0.5 + 0.11, that of none nothing; both then run together.
    assert prefilled.generation_end - received.generation_end == pytest.approx(0.61, rel=0.2)


def test_a_moved_request_leaves_its_shared_prefix_behind():
    # Requests 1 and 3 share prompts with 0 and 2 on their replica; one slot each, so they wait while the first two run.
    requests = Requests.of(np.full(5, 50), np.array([9, 60, 60, 60, 1]), np.array([0, 49, 0, 49, 0]))
    begun = RolloutState.begin(requests, linear_timing(max_batch=1), [np.array([4, 0, 1]), np.array([2, 3])])
    time = trigger_time(begun.advance(), 4)
    state = begun.advance(time)
    assert state.cached.tolist() == [0, 49, 0, 49, 0]
    shared = migrated(state, time, 1, NOTHING, MigrationCost())
    assert shared.survivors.tolist() == [1]
    alone = migrated(replace(state, cached=np.array([0, 0, 0, 49, 0])), time, 1, NOTHING, MigrationCost())
    assert shared.generation_end == pytest.approx(alone.generation_end)
    # What waited has no context that could be transferred.
    received = migrated(state, time, 1, NOTHING, MigrationCost(seconds_per_token=100.0))
    assert received.generation_end == pytest.approx(shared.generation_end)


def test_slow_transfer_delays_one_request_after_the_other():
    time, rollout = paused(8)
    fast = migrated(rollout, time, 1, NOTHING, MigrationCost(0.0, 0.0))
    slow = migrated(rollout, time, 1, NOTHING, MigrationCost(0.0, 0.01))
    left = np.isnan(rollout.finish) & ~np.isin(rollout.replica_of, slow.survivors)
    waits = np.sort(slow.rollout.arrival[left]) - time
    context = (rollout.requests.prompt + rollout.done)[left]
    assert waits[-1] == pytest.approx(0.01 * context.sum())
    assert slow.generation_end > fast.generation_end


def test_memory_and_slots_bound_the_survivors():
    _, rollout = paused(20)
    assert least_survivors(rollout) == 1
    _, rollout = paused(40)
    assert least_survivors(rollout) == 2
    _, rollout = paused(20, timing=roofline_timing(max_batch=32, kv_capacity=3000))
    assert least_survivors(rollout) == 3


def test_inference_ends_by_hand():
    finish, work = np.array([1.0, 2.0, 10.0]), np.array([2.0, 2.0, 2.0])
    assert inference_end(finish, work, 10.0, 10.0, 0.0, 0.0, 2.0) == 13.0
    # Released at 4 with one replica: 4 of 6 done by 8, the last sample at 10 on two.
    assert inference_end(finish, work, 4.0, 10.0, 0.0, 1.0, 2.0) == 11.0
    # Released at 9: 1 of the first 4 done by 10.
    assert inference_end(finish, work, 9.0, 10.0, 0.0, 1.0, 2.0) == 12.5
    # Half a replica from the start: idle until 1, behind from then on.
    assert inference_end(finish, work, 10.0, 10.0, 0.5, 0.0, 2.0) == 11.0


def test_shared_saturated_devices_gain_nothing():
    time, rollout = paused(20)
    alone = migrated(rollout, time, 2, InferenceWork(1e-4), MigrationCost())
    shared = migrated(rollout, time, 2, InferenceWork(1e-4, dedicated=False, headroom=0.5), MigrationCost())
    work = 1e-4 * rollout.requests.tokens.sum() / 4
    assert shared.seconds == pytest.approx(shared.generation_end + work)
    assert alone.seconds < shared.seconds


def test_inference_does_not_end_with_the_last_sample():
    time, rollout = paused(20)
    result = migrated(rollout, time, 2, InferenceWork(1e-9, last_seconds=3.0), MigrationCost())
    assert result.seconds == pytest.approx(result.generation_end + 3.0)


def test_impossible_values_are_refused():
    time, rollout = paused(20)
    with pytest.raises(FuseError, match=r"survivors=4: needs 1 to 3 of 4 replicas"):
        migrated(rollout, time, 4, NOTHING, MigrationCost())
    with pytest.raises(FuseError, match="inference per_token=-1"):
        InferenceWork(-1)
    with pytest.raises(FuseError, match=r"slice_factor=0"):
        InferenceWork(1, slice_factor=0)
