"""The threshold chosen by simulation, against an exhaustive scan."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from timings import roofline_timing

from verl_fuse.errors import FuseError
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.simulate.threshold import ThresholdScan, best_threshold

SAMPLES, REPLICAS = 256, 8
RUNS = Path(__file__).parents[2] / "golden/cpu_runs.json"


def recorded() -> list[int]:
    """Response lengths of seven steps of the recipe ppo-cpu on real vLLM: 448 samples, half of them of at most 7
    tokens, the longest of 240."""
    runs = {run["name"]: run for run in json.loads(RUNS.read_text())["runs"]}
    return [length for step in runs["ppo-cpu"]["steps"] for length in step["responses"]]


DISTRIBUTIONS = {
    "uniform": lambda rng, n: rng.integers(1, 2049, n),
    "lognormal 0.5": lambda rng, n: rng.lognormal(np.log(400), 0.5, n),
    "lognormal 1.0": lambda rng, n: rng.lognormal(np.log(400), 1.0, n),
    "lognormal 1.5": lambda rng, n: rng.lognormal(np.log(300), 1.5, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.9, rng.normal(200, 40, n), rng.normal(1800, 100, n)),
    "recorded": lambda rng, n: rng.choice(recorded(), n),
    "fixed": lambda rng, n: np.full(n, 700),
}
INFERENCE = InferenceWork(per_token=4e-5, slice_factor=1.1, load_seconds=0.2, last_seconds=0.05)
MIGRATION = MigrationCost(0.05)


def draw(name: str, seed: int, samples: int = SAMPLES) -> Requests:
    rng = np.random.default_rng(seed)
    response = np.clip(DISTRIBUTIONS[name](rng, samples).astype(int), 1, 2048)
    return Requests.of(rng.integers(50, 500, samples), response)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_within_three_per_cent_of_an_exhaustive_scan(name: str):
    draws = [draw(name, seed) for seed in range(2)]
    timing = roofline_timing(max_batch=64)
    chosen = best_threshold(draws, REPLICAS, timing, INFERENCE, MIGRATION)
    begun = [RolloutState.begin(requests, timing, round_robin(SAMPLES, REPLICAS)) for requests in draws]
    scan = ThresholdScan(begun, INFERENCE, MIGRATION)
    thresholds = range(1, SAMPLES, 2)
    scan.prepare(thresholds)
    best = min(
        scan.seconds(threshold, survivors)
        for threshold, survivors in product(thresholds, range(1, REPLICAS))
        if survivors >= scan.least_survivors(threshold)
    )
    assert chosen.seconds <= min(best, scan.stock_seconds) * 1.03
    assert chosen.seconds <= chosen.stock_seconds


def test_seconds_are_means_over_draws_and_survivors_hold_the_tail_of_every_draw():
    timing = roofline_timing(max_batch=32, kv_capacity=6000)
    draws = [draw("fixed", 0), draw("bimodal", 0), draw("lognormal 1.5", 0)]
    begun = [RolloutState.begin(requests, timing, round_robin(SAMPLES, REPLICAS)) for requests in draws]
    alone = [ThresholdScan([rollout], INFERENCE, MIGRATION) for rollout in begun]
    scan = ThresholdScan(begun, INFERENCE, MIGRATION)
    for one in (scan, *alone):
        one.prepare([40])
    assert scan.stock_seconds == pytest.approx(np.mean([one.stock_seconds for one in alone]))
    assert scan.seconds(40, REPLICAS - 1) == pytest.approx(np.mean([one.seconds(40, REPLICAS - 1) for one in alone]))
    least = [one.least_survivors(40) for one in alone]
    assert len(set(least)) > 1
    assert scan.least_survivors(40) == max(least)


def test_a_long_tail_is_worth_migrating():
    draws = [draw("bimodal", 0)]
    chosen = best_threshold(draws, REPLICAS, roofline_timing(), INFERENCE, MIGRATION)
    assert 0 < chosen.threshold < SAMPLES / 2
    assert chosen.seconds < 0.95 * chosen.stock_seconds


def test_saturated_shared_devices_stay_stock():
    inference = InferenceWork(per_token=4e-5, dedicated=False)
    chosen = best_threshold([draw("bimodal", 0)], REPLICAS, roofline_timing(), inference, MIGRATION)
    assert (chosen.threshold, chosen.survivors, chosen.seconds) == (0, REPLICAS, chosen.stock_seconds)


def test_slow_migration_is_not_chosen():
    slow = best_threshold([draw("bimodal", 0)], REPLICAS, roofline_timing(), INFERENCE, MigrationCost(latency=100.0))
    fast = best_threshold([draw("bimodal", 0)], REPLICAS, roofline_timing(), INFERENCE, MIGRATION)
    assert fast.seconds < slow.seconds <= slow.stock_seconds < 100.0


def test_one_replica_has_nowhere_to_migrate_to():
    assert best_threshold([draw("bimodal", 0)], 1, roofline_timing(), INFERENCE, MIGRATION).threshold == 0


def test_few_samples():
    draws = [draw("uniform", 0, 2)]
    assert best_threshold(draws, REPLICAS, roofline_timing(), INFERENCE, MIGRATION).seconds > 0


def test_draws_must_agree():
    with pytest.raises(FuseError, match=r"rollouts of \(samples, replicas\) \[\(100, 4\), \(256, 4\)\]"):
        best_threshold([draw("fixed", 0), draw("fixed", 0, 100)], 4, roofline_timing(), INFERENCE)
