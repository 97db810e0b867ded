"""What numbers of replicas take, learned from the outcomes of steps."""

import pytest

from verl_fuse_elastic.outcomes import FORGOTTEN_AFTER, HOPE, Outcomes
from verl_fuse_elastic.scaling import Forecast

DECODING = Forecast(2, 10.0, 26.0, starting=6.0)
MODEL = Forecast(2, 11.0, 28.0, starting=6.0)


def test_a_constant_factor_is_known_from_the_second_step_on():
    outcomes = Outcomes()
    assert outcomes.expected(DECODING, MODEL) == MODEL
    for said in (11.0, 15.0):
        outcomes.learn(DECODING, 15.0, 10.0, said)
        assert outcomes.expected(DECODING, MODEL) == Forecast(2, 15.0, 10.0 + 6.0, starting=6.0)
        assert outcomes.hoped(DECODING, MODEL) == outcomes.expected(DECODING, MODEL)


def test_a_number_that_never_ran_is_hoped_to_be_better_by_as_much_as_forecasts_miss():
    outcomes, one, model = Outcomes(), Forecast(1, 10.0, 10.0), Forecast(1, 20.0, 20.0)
    outcomes.learn(DECODING, 12.0, 20.0, said=10.0)
    assert outcomes.expected(one, model) == model
    assert outcomes.hoped(one, model).seconds == pytest.approx(0.8 * 20.0)
    assert outcomes.hoped(one, model).replica_seconds == pytest.approx(0.8 * 20.0)
    for _ in range(20):
        outcomes.learn(DECODING, 12.0, 20.0, said=12.0)
    assert outcomes.hoped(one, model).seconds == pytest.approx(20.0, rel=1e-3), "forecasts are right"
    outcomes.learn(DECODING, 100.0, 20.0, said=1.0)
    assert 0 < outcomes.doubt < HOPE


def test_a_strange_step_counts_less_than_half():
    outcomes = Outcomes()
    outcomes.learn(DECODING, 10.0, 20.0, 10.0)
    outcomes.learn(DECODING, 20.0, 40.0, 10.0)
    assert outcomes.expected(DECODING, MODEL) == Forecast(2, pytest.approx(14.0), pytest.approx(28.0 + 6.0), 6.0)


def test_a_number_that_has_not_run_for_long_is_forgotten():
    outcomes, one = Outcomes(), Forecast(1, 10.0, 10.0)
    outcomes.learn(DECODING, 15.0, 10.0, 11.0)
    for _ in range(FORGOTTEN_AFTER - 1):
        outcomes.learn(one, 10.0, 10.0, 10.0)
    assert outcomes.expected(DECODING, MODEL) != MODEL
    outcomes.learn(one, 10.0, 10.0, 10.0)
    assert outcomes.expected(DECODING, MODEL) == MODEL


@pytest.mark.parametrize("figures", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)])
def test_a_step_without_work_tells_nothing(figures: tuple[float, float, float]):
    outcomes = Outcomes()
    outcomes.learn(DECODING, *figures)
    outcomes.learn(Forecast(2, 0.0, 0.0), 1.0, 1.0, 1.0)
    assert outcomes == Outcomes()
