"""Event by event equals token by token."""

import numpy as np
import pytest
from timings import linear_timing, roofline_decode, roofline_timing
from token_by_token import simulate

from verl_fuse.simulate.replica_kernel import prefill_seconds
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.simulate.timing import ReplicaTiming


def prefill_of(t: ReplicaTiming, sequences: int, tokens: int, squares: float) -> float:
    return prefill_seconds(
        sequences, tokens, squares, t.prefill_tokens, t.prefill_seconds, t.request_seconds, t.square_seconds
    )


def reference(rollout: RolloutState, replica: int = 0):
    t = rollout.timing
    return simulate(
        rollout.queue(replica).tolist(),
        rollout.requests.prompt.tolist(),
        rollout.requests.response.tolist(),
        t.step_seconds,
        lambda *prompts: prefill_of(t, *prompts),
        max_batch=t.max_batch,
        kv_capacity=t.kv_capacity,
        budget=t.prefill_budget,
        cached=dict(enumerate(rollout.requests.cached.tolist())),
        arrival=dict(enumerate(rollout.arrival.tolist())),
    )


def random_rollout(seed: int, timing: ReplicaTiming, longest: int, count: int = 40) -> RolloutState:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, longest // 3, count)
    response = np.clip(rng.lognormal(np.log(longest / 8), 1.0, count).astype(int), 1, longest - longest // 3)
    cached = np.where(rng.random(count) < 0.3, prompt, 0)
    return RolloutState.begin(Requests.of(prompt, response, cached), timing, [rng.permutation(count)])


def test_two_requests_by_hand():
    timing = linear_timing(max_batch=1)
    rollout = RolloutState.begin(
        Requests.of(np.array([10, 20]), np.array([1, 3])), timing, [np.array([0, 1])]
    ).advance()
    # 0.5 + 0.1; then 0.5 + 0.2 and two steps of 1.02 + 1e-4 * (21, 22)
    assert rollout.finish == pytest.approx([0.6, 0.6 + 0.7 + 2.04 + 0.0043], rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch": 3}, {"kv_capacity": 900, "max_batch": 16}, {"prefill_budget": 100, "kv_capacity": 600}],
)
def test_finish_times_equal_token_by_token(seed: int, options: dict):
    rollout = random_rollout(seed, linear_timing(**options), 400).advance()
    finish, batch, tokens = reference(rollout)
    assert rollout.finish == pytest.approx([finish[i] for i in range(len(finish))], rel=1e-9)
    assert batch <= rollout.timing.max_batch
    assert tokens <= rollout.timing.kv_capacity


def test_memory_limit_throws_out_the_last_one():
    timing = linear_timing(kv_capacity=400, max_batch=4)
    slow = RolloutState.begin(Requests.of(np.array([1, 1]), np.array([390, 300])), timing, [np.array([0, 1])]).advance()
    free = RolloutState.begin(slow.requests, linear_timing(max_batch=4), [np.array([0, 1])]).advance()
    assert slow.finish[1] > slow.finish[0] > free.finish[1]
    finish, _, fullest = reference(slow)
    assert slow.finish == pytest.approx([finish[0], finish[1]], rel=1e-9)
    assert fullest <= 400


@pytest.mark.parametrize("seed", range(5))
def test_a_kink_between_columns_costs_little(seed: int):
    timing = roofline_timing(max_batch=64)
    rollout = random_rollout(seed, timing, 2000, 200).advance()
    exact = simulate(
        rollout.queue(0).tolist(),
        rollout.requests.prompt.tolist(),
        rollout.requests.response.tolist(),
        lambda batch, context: float(roofline_decode(batch, batch * context)),
        lambda *prompts: prefill_of(timing, *prompts),
        max_batch=64,
        kv_capacity=timing.kv_capacity,
        budget=timing.prefill_budget,
        cached=dict(enumerate(rollout.requests.cached.tolist())),
    )[0]
    assert rollout.finish == pytest.approx([exact[i] for i in range(200)], rel=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_stopping_changes_nothing(seed: int):
    whole = random_rollout(seed, linear_timing(kv_capacity=700), 400)
    through = whole.advance()
    pieces = whole
    for until in np.sort(np.random.default_rng(seed).uniform(0, through.seconds, 7)):
        pieces = pieces.advance(until)
        assert (pieces.clocks >= until).all() or np.isfinite(pieces.finish).all()
    pieces = pieces.advance()
    assert pieces.finish == pytest.approx(through.finish, rel=1e-9)
    assert pieces.busy == pytest.approx(through.busy, rel=1e-9)


def test_late_requests_wait_for_their_arrival():
    rollout = random_rollout(3, linear_timing(), 400)
    rollout.arrival[rollout.queue(0)] = np.linspace(0, 300, 40)
    rollout = rollout.advance()
    finish, _, _ = reference(rollout)
    assert rollout.finish == pytest.approx([finish[i] for i in range(40)], rel=1e-9)


def test_a_request_that_arrives_to_an_idle_replica_starts_then():
    rollout = RolloutState.begin(Requests.of(np.array([10]), np.array([1])), linear_timing(), [np.array([0])])
    rollout.arrival[0] = 100.0
    assert rollout.advance().finish == pytest.approx([100.6])
    assert rollout.advance().busy == pytest.approx([0.6])
