"""The arithmetic of `make bench BENCH=learning`."""

import math

import pytest

from ci.bench.learning import MISSING, REWARD, report, table, trained


def test_the_interval_is_that_of_the_seeds_differences():
    curves = {
        "without": {seed: [0.0, 0.5, 0.5] for seed in range(4)},
        "with": {seed: [1.0, 0.5, 0.5 + 0.2 * part] for seed, part in enumerate((-1, 0, 0, 1))},
    }
    found = report(curves, last=2)
    assert found["differences"] == pytest.approx([-0.1, 0.0, 0.0, 0.1])
    half = 2.353 * math.sqrt(0.02 / 3) / math.sqrt(4)
    assert found["interval_90"] == pytest.approx([-half, half], abs=1e-4)
    assert (found["seeds"], found["difference"], found["reward_without"]) == (4, 0.0, 0.5)


def test_a_run_that_lost_a_sample_has_no_curve():
    steps = {step: {REWARD: step / 10, MISSING: 0} for step in (1, 2, 3)}
    assert trained(steps, 2) == [0.1, 0.2]
    steps[2][MISSING] = 1
    with pytest.raises(SystemExit, match=r"missing in the steps \[2\]"):
        trained(steps, 3)


def test_the_table_has_each_arms_means_over_the_run():
    curve = [0.1] * 2 + [0.2] * 8
    curves = {"without": {0: curve, 1: curve}, "with": {0: curve[::-1], 1: curve[::-1]}}
    assert table(curves).splitlines() == [
        "| steps | 1 to 2 | 3 to 4 | 5 to 6 | 7 to 8 | 9 to 10 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| without | 0.100 | 0.200 | 0.200 | 0.200 | 0.200 |",
        "| with | 0.200 | 0.200 | 0.200 | 0.200 | 0.100 |",
    ]
