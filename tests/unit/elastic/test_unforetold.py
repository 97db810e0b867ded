import pytest

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.assignment import Line
from verl_fuse_elastic.corrections import Unforetold
from verl_fuse_elastic.scaling import Terms, forecasts

PROMPTS = [Prompt(f"u{n}", f"k{n}", "math", 4, Prediction(50.0, 50.0)) for n in range(16)]
PREFILL = 0.3


def foretold(each):
    line = Line(PROMPTS, 64, DecodeCost(0.1, 0.01), each=each)
    return {found.count: found.replica_seconds for found in forecasts(line, Terms(0.5, 1, 4), 4, released=True)}


def test_forecasts_are_right_from_the_second_on_for_any_number_of_replicas():
    unforetold, real = Unforetold(), foretold(PREFILL)
    assert real[1] - foretold(0.0)[1] == pytest.approx(64 * PREFILL)
    unforetold.learn(foretold(0.0)[4], real[4], 64)
    assert unforetold.seconds == pytest.approx(PREFILL)
    assert foretold(unforetold.seconds) == pytest.approx(real)
    unforetold.learn(real[1], real[1], 64)
    assert unforetold.seconds == pytest.approx(PREFILL)


def test_a_forecast_that_was_too_long_says_nothing_of_what_it_left_out():
    unforetold = Unforetold()
    unforetold.learn(10.0, 7.0, 16)
    assert unforetold.seconds == 0.0
    unforetold.learn(10.0, 14.0, 16)
    assert 0.0 < unforetold.seconds < 4 / 16


def test_one_strange_step_changes_less_than_the_half():
    unforetold = Unforetold(0.2, known=True)
    unforetold.learn(10.0, 26.0, 16)
    assert unforetold.seconds == pytest.approx(0.2 + 0.4)
