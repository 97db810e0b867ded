"""Requests on several replicas."""

import numpy as np
import pytest
from timings import linear_timing

from verl_fuse.errors import FuseError
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin


def requests(count: int = 20) -> Requests:
    rng = np.random.default_rng(0)
    return Requests.of(rng.integers(1, 100, count), rng.integers(1, 200, count))


def test_round_robin_deals_like_cards():
    assert [queue.tolist() for queue in round_robin(5, 2)] == [[0, 2, 4], [1, 3]]


def test_every_request_finishes_once():
    rollout = RolloutState.begin(requests(), linear_timing(), round_robin(20, 3)).advance()
    assert np.isfinite(rollout.finish).all()
    assert (rollout.done == rollout.requests.response).all()
    assert rollout.replica_of.tolist() == [i % 3 for i in range(20)]


def test_advancing_leaves_the_earlier_state_alone():
    begun = RolloutState.begin(requests(), linear_timing(), round_robin(20, 3))
    begun.advance()
    assert begun.clocks.tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(begun.finish).all()


@pytest.mark.parametrize(("queues", "entries"), [([[0, 1], [1, 2]], 4), ([[0, 1]], 2)])
def test_a_request_stands_in_one_queue(queues: list, entries: int):
    with pytest.raises(FuseError, match=f"queues hold {entries} entries for 3 requests"):
        RolloutState.begin(requests(3), linear_timing(), [np.array(queue) for queue in queues])


def test_impossible_requests_are_refused():
    with pytest.raises(FuseError, match="2 prompts and 1 responses"):
        Requests.of(np.array([1, 2]), np.array([1]))
    with pytest.raises(FuseError, match="response lengths from 0"):
        Requests.of(np.array([1]), np.array([0]))
    long = Requests.of(np.array([1]), np.array([600]))
    with pytest.raises(FuseError, match=r"a sequence of 601 tokens exceeds the replica's KV capacity of 500"):
        RolloutState.begin(long, linear_timing(kv_capacity=500), [np.array([0])])
