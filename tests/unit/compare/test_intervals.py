"""Intervals of a few noisy steps, and how often they hold the truth."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from verl_fuse.compare.intervals import autocorrelation, difference, mean, ratio, student_t

RUNS = 1000
# 95 % of `RUNS` runs, less three standard errors.
LEAST = 0.95 - 3 * math.sqrt(0.95 * 0.05 / RUNS)


def covered(draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]], truth: float) -> float:
    """Share of runs whose interval of the ratio holds the truth."""
    rng = np.random.default_rng(0)
    return float(np.mean([ratio(*map(list, draw(rng))).holds(truth) for _ in range(RUNS)]))


def neighbours(rng: np.random.Generator, steps: int, share: float) -> np.ndarray:
    """Standard normal, of which neighbours are correlated by `share`."""
    series = np.empty(steps)
    level = rng.normal()
    for index in range(steps):
        series[index] = level
        level = share * level + math.sqrt(1 - share**2) * rng.normal()
    return series


def pair(rng: np.random.Generator, steps: int, taken: float = 0.8, noise: float = 0.15, share: float = 0.0):
    """Two runs whose steps grow by half while they go on."""
    growth = np.linspace(1.0, 1.5, steps)
    first, second = (growth * np.exp(noise * neighbours(rng, steps, share)) for _ in range(2))
    return first, taken * second


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_students_t_is_that_of_the_tables(degrees: int, value: float):
    assert student_t(degrees) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("steps", [2, 3, 5, 12, 40])
def test_independent_steps_are_covered(steps: int):
    assert covered(lambda rng: pair(rng, steps), 0.8) >= LEAST


@pytest.mark.parametrize("steps", [3, 5, 12, 40])
def test_runs_of_one_speed_are_rarely_told_apart(steps: int):
    assert covered(lambda rng: pair(rng, steps, taken=1.0), 1.0) >= LEAST


def test_a_step_in_ten_that_takes_three_times_as_long_is_covered():
    def draw(rng: np.random.Generator):
        first, second = pair(rng, 20)
        return tuple(run * np.where(rng.random(20) < 0.1, 3.0, 1.0) for run in (first, second))

    assert covered(draw, 0.8) >= 0.93


@pytest.mark.parametrize(
    ("share", "steps", "least"), [(0.3, 12, 0.89), (0.3, 40, 0.91), (0.6, 12, 0.80), (0.6, 40, 0.88)]
)
def test_steps_that_are_slow_together_are_covered_less(share: float, steps: int, least: float):
    found = covered(lambda rng: pair(rng, steps, share=share), 0.8)
    assert least <= found < 0.96


def test_the_correlation_of_neighbours_widens_the_interval():
    rng = np.random.default_rng(0)
    assert np.mean([autocorrelation(neighbours(rng, 60, 0.6)) for _ in range(100)]) == pytest.approx(0.6, abs=0.08)
    drifting, shuffled = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.4, 1.1, 1.5, 1.2, 1.3]
    assert mean(drifting).high > mean(shuffled).high


def test_swapping_inverts_a_ratio_and_negates_a_difference():
    one, other = [5.0, 5.5, 4.8, 5.2], [4.1, 4.3, 3.9, 4.4]
    forward, back = ratio(one, other), ratio(other, one)
    assert forward.value == pytest.approx(1 / back.value)
    assert (forward.low, forward.high) == (pytest.approx(1 / back.high), pytest.approx(1 / back.low))
    assert difference(one, other).low == pytest.approx(-difference(other, one).high)


def test_equal_values_have_no_width_and_one_value_has_no_interval():
    assert (mean([3.0, 3.0, 3.0]).low, mean([3.0, 3.0, 3.0]).high) == (3.0, 3.0)
    assert ratio([2.0, 3.0], [1.0, 1.5]).low == pytest.approx(0.5)
    assert mean([3.0]).low is None
    assert ratio([3.0], [1.5]).high is None
    assert ratio([3.0], [1.5]).value == 0.5
