"""Elastic replica count."""

import numpy as np
import pytest
from timings import roofline_timing

from ci.bench.elastic_simulated import infer_on_freed
from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.elastic import (
    BALANCES,
    ReplicaAssignment,
    best_assignment,
    cut_and_migrate,
    queues_of,
    run_elastic,
    shared_prefixes,
)
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.simulate.tail import InferenceWork


def lengths(seed: int = 0, prompts: int = 40, samples: int = 4, noise: float = 0.2) -> DrawnLengths:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(prompts), samples)
    predicted = np.clip(rng.lognormal(np.log(250), 0.9, prompts).astype(int), 5, 2000)[group]
    response = np.clip(predicted * rng.lognormal(0, noise, len(group)), 1, 2048).astype(int)
    return DrawnLengths(group, rng.integers(50, 400, prompts)[group], response, predicted)


PREDICTED, GROUP = np.array([10, 10, 500, 500, 90, 90, 300, 300]), np.array([0, 0, 1, 1, 2, 2, 3, 3])


def test_prompts_of_similar_length_share_an_actor():
    queues = queues_of(ReplicaAssignment(2, 0.0), PREDICTED, GROUP)
    assert [queue.tolist() for queue in queues] == [[2, 3, 6, 7], [4, 5, 0, 1]]


def test_equal_tokens_leave_long_prompts_in_small_company():
    queues = queues_of(ReplicaAssignment(2, 1.0), PREDICTED, GROUP)
    assert [queue.tolist() for queue in queues] == [[2, 3], [6, 7, 4, 5, 0, 1]]


def test_without_a_balance_prompts_are_dealt_out():
    queues = queues_of(ReplicaAssignment(2, None), PREDICTED, GROUP)
    assert [queue.tolist() for queue in queues] == [[4, 5, 0, 1], [2, 3, 6, 7]]


def test_a_prompt_is_prefilled_once_per_actor():
    cached = shared_prefixes(np.array([10, 10, 10, 7]), np.array([0, 0, 0, 1]), [np.array([0, 1]), np.array([2, 3])])
    assert cached.tolist() == [0, 9, 0, 0]


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("fraction", [0.5, 0.8, 1.0])
def test_every_request_finishes_once(balance: float | None, replicas: int, fraction: float):
    drawn = lengths()
    run = run_elastic(
        drawn,
        roofline_timing(max_batch=64),
        ReplicaAssignment(replicas, balance),
        SimulationOptions(cut_fraction=fraction),
    )
    assert np.isfinite(run.rollout.finish).all()
    assert (run.rollout.done == drawn.response).all()
    assert run.ends.max() == pytest.approx(run.seconds)
    assert np.sort(run.rollout.queues).tolist() == list(range(160))


def test_nothing_moves_without_a_cut():
    run = run_elastic(lengths(), roofline_timing(max_batch=64), ReplicaAssignment(4, 0.0), SimulationOptions())
    assert run.moved == 0


def test_a_cut_gives_devices_back_earlier():
    timing = roofline_timing(max_batch=64)
    whole, cut = (run_elastic(lengths(), timing, ReplicaAssignment(8, 0.0, f), SimulationOptions()) for f in (1.0, 0.8))
    assert cut.moved > 0
    assert cut.ends.sum() < whole.ends.sum()
    assert cut.seconds < whole.seconds * 1.1


def test_the_rest_is_spread_over_the_actors_that_still_run():
    # 0.6 of six are four, not three.
    requests = Requests.of(np.full(12, 10), np.array([5, 6, 7, 8, 100, 100, *[900] * 6]))
    rollout = RolloutState.begin(
        requests, roofline_timing(max_batch=8), [np.arange(6), np.arange(6, 9), np.arange(9, 12)]
    )
    run = cut_and_migrate(rollout, 0.6, 0.0)
    assert run.moved == 2
    assert sorted(run.rollout.replica_of[[4, 5]].tolist()) == [1, 2]


def test_the_rest_may_need_the_free_slots_of_several():
    requests = Requests.of(np.full(10, 10), np.array([10, 10, 100, 100, *[900] * 6]))
    rollout = RolloutState.begin(
        requests, roofline_timing(max_batch=4), [np.arange(4), np.arange(4, 7), np.arange(7, 10)]
    )
    run = cut_and_migrate(rollout, 0.5, 0.0)
    assert sorted(run.rollout.replica_of[[2, 3]].tolist()) == [1, 2]
    assert run.ends[0] < run.rollout.finish[[2, 3]].min()


def test_no_free_slots_no_move():
    requests = Requests.of(np.full(8, 10), np.array([10, 10, 10, 900, 900, 900, 900, 900]))
    rollout = RolloutState.begin(requests, roofline_timing(max_batch=4), [np.arange(4), np.arange(4, 8)])
    assert cut_and_migrate(rollout, 0.75, 0.0).moved == 0


def test_time_and_cost_pull_the_number_of_actors_apart():
    timing, drawn = roofline_timing(max_batch=256), lengths(prompts=100)
    fast, cheap = (best_assignment(drawn, timing, 16, SimulationOptions(time_weight=weight)) for weight in (1.0, 0.0))
    assert cheap.replicas < fast.replicas <= 16


def test_time_alone_is_never_given_up():
    timing, drawn = roofline_timing(max_batch=256), lengths(prompts=100)
    options = SimulationOptions(time_weight=1.0)
    best, dealt = (
        run_elastic(drawn, timing, a, options).seconds
        for a in (best_assignment(drawn, timing, 8, options), ReplicaAssignment(8, None))
    )
    assert best <= dealt


def fluid(run, replicas: int, inference: InferenceWork) -> tuple[float, float]:
    """Moment by moment: seconds until all is inferred, and replica-seconds of loading and computing
    before generation ended."""
    moment, end = run.seconds / 20_000, run.seconds
    releases = np.concatenate([run.ends, np.zeros(replicas - len(run.ends))]) + inference.load_seconds
    arriving = sorted(zip(run.rollout.finish, inference.work(run.rollout.requests), strict=True), reverse=True)
    waiting, early, now = 0.0, 0.0, 0.0
    while arriving or waiting > 0:
        while arriving and arriving[-1][0] <= now:
            waiting += arriving.pop()[1]
        power = (releases <= now).sum() / inference.slice_factor if now < end else float(replicas)
        done = min(waiting, power * moment)
        waiting -= done
        loading = ((releases - inference.load_seconds <= now) & (now < releases)).sum() * moment
        early += done * inference.slice_factor + loading if now < end else 0.0
        now += moment
    return now, early


@pytest.mark.parametrize("replicas", [3, 8])
@pytest.mark.parametrize("per_token", [2e-5, 1e-3, 5e-3])
def test_inference_on_freed_devices_takes_what_a_fluid_takes(replicas: int, per_token: float):
    run = run_elastic(
        lengths(), roofline_timing(max_batch=64), ReplicaAssignment(replicas, 0.0), SimulationOptions(cut_fraction=0.8)
    )
    inference = InferenceWork(per_token, 1e-8, slice_factor=1.5, load_seconds=0.3)
    end, early = infer_on_freed(run, 8, inference)
    slow_end, slow_early = fluid(run, 8, inference)
    assert end == pytest.approx(slow_end, rel=1e-3)
    assert early == pytest.approx(slow_early, rel=1e-2)
    assert (end > run.seconds * 1.01) == (per_token > 2e-5), "from hidden to far too much"


def test_the_last_sample_is_inferred_after_generation():
    run = run_elastic(lengths(), roofline_timing(max_batch=64), ReplicaAssignment(8, 0.0), SimulationOptions())
    assert infer_on_freed(run, 8, InferenceWork(1e-9, last_seconds=0.25))[0] == run.seconds + 0.25
    assert infer_on_freed(run, 8, InferenceWork(0.0, last_seconds=0.25)) == (run.seconds, 0.0)
