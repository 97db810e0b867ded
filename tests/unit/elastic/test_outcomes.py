"""How forecasts of each number of replicas miss, learned from the outcomes of steps."""

from dataclasses import replace

import numpy as np
import pytest

from verl_fuse_elastic.outcomes import FIRST_SLOPE, KNOWN, Outcomes
from verl_fuse_elastic.scaling import Forecast

ONE, TWO, FOUR, EIGHT = (Forecast(count, 10.0 / count, 10.0) for count in (1, 2, 4, 8))


def test_before_any_outcome_the_model_is_right():
    assert Outcomes().expected(TWO) == TWO


def test_a_constant_factor_is_known_for_any_number_and_the_slope_stays():
    outcomes = Outcomes()
    for _ in range(5):
        outcomes.learn(TWO, 3 * TWO.seconds, 2 * TWO.replica_seconds)
    for number in (ONE, TWO, FOUR):
        assert outcomes.expected(number).seconds == pytest.approx(3 * number.seconds, rel=0.03)
        assert outcomes.expected(number).replica_seconds == pytest.approx(2 * number.replica_seconds, rel=0.03)
    assert outcomes.uncertainty >= FIRST_SLOPE


def test_replicas_that_slow_each_other_are_foretold_once_two_numbers_have_run():
    """Seconds that do not fall with the number: forecasts miss by the number itself."""
    outcomes = Outcomes()
    for number in (TWO, ONE) * 8:
        outcomes.learn(number, 10.0, 10.0 * number.count)
    foretold = outcomes.expected(FOUR)
    assert FOUR.seconds < foretold.seconds < 10.0
    assert foretold.seconds == pytest.approx(10.0, rel=0.25), "a slope is counted without its standard deviation"
    assert foretold.replica_seconds == pytest.approx(40.0, rel=0.25)
    assert outcomes.uncertainty < FIRST_SLOPE / 2


def test_a_slope_within_its_standard_deviation_does_not_count():
    outcomes, rng = Outcomes(), np.random.default_rng(0)
    for number in (TWO, ONE):
        seconds = number.seconds * np.exp(0.05 * rng.standard_normal())
        outcomes.learn(number, seconds, seconds * number.count)
    assert outcomes.expected(FOUR).seconds / FOUR.seconds == outcomes.expected(ONE).seconds / ONE.seconds


def test_another_number_is_hoped_to_be_better_while_the_slope_is_unknown():
    outcomes = Outcomes()
    assert outcomes.hoped(ONE) == ONE, "nothing has run"
    for _ in range(20):
        outcomes.learn(TWO, TWO.seconds, TWO.replica_seconds)
    assert outcomes.hoped(TWO) == TWO
    better = 2 ** -(outcomes.uncertainty - KNOWN)
    for number in (ONE, FOUR):
        assert outcomes.hoped(number).seconds == pytest.approx(number.seconds * better)
        assert outcomes.hoped(number).replica_seconds == pytest.approx(number.replica_seconds * better)
    assert outcomes.hoped(EIGHT) == EIGHT, "too far for a trial"


def test_a_slope_that_is_known_leaves_nothing_to_hope_for():
    outcomes = Outcomes()
    for number in (FOUR, ONE) * 20:
        outcomes.learn(number, number.seconds, number.replica_seconds)
    assert outcomes.uncertainty < KNOWN
    assert outcomes.hoped(TWO) == outcomes.expected(TWO)


def test_a_slope_is_taken_out_of_replica_seconds():
    outcomes = Outcomes()
    assert outcomes.without_slope(4, 40.0) == 40.0
    for number in (TWO, ONE) * 20:
        outcomes.learn(number, 10.0, 10.0 * number.count)
    # Two replicas, the first number, hold twice the forecast; four would hold four times theirs.
    assert outcomes.without_slope(2, 20.0) == 20.0
    assert outcomes.without_slope(4, 40.0) == pytest.approx(20.0, rel=0.05)


def test_replicas_that_start_hold_what_they_held():
    outcomes, starting = Outcomes(), replace(TWO, replica_seconds=16.0, starting=6.0)
    for _ in range(5):
        outcomes.learn(starting, 10.0, 20.0)
    assert outcomes.expected(starting).replica_seconds == pytest.approx(20.0 + 6.0, rel=0.02)


@pytest.mark.parametrize("taken", [(0.0, 1.0), (1.0, 0.0)])
def test_a_step_without_work_tells_nothing(taken: tuple[float, float]):
    outcomes = Outcomes()
    outcomes.learn(TWO, *taken)
    outcomes.learn(Forecast(2, 0.0, 0.0), 1.0, 1.0)
    assert outcomes.expected(ONE) == ONE
    assert outcomes.uncertainty == FIRST_SLOPE
