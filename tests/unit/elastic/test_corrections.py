"""Seconds beside decoding and misses by number, learned from the same steps."""

from functools import partial

import pytest

from verl_fuse_elastic.corrections import Corrections
from verl_fuse_elastic.scaling import Forecast

SAMPLES = 8


def model(count: int, each: float) -> Forecast:
    """Replicas with an even share of 40 seconds of decoding, and `each` seconds for each sample."""
    held = 40.0 + SAMPLES * each
    return Forecast(count, held / count, held)


def test_seconds_of_samples_are_no_miss():
    corrections = Corrections()
    corrections.learn(partial(model, 2), SAMPLES, 24.0, 48.0)
    assert corrections.unforetold.seconds == pytest.approx(1.0)
    for count in (1, 2, 4):
        assert corrections.outcomes.expected(model(count, 1.0)) == model(count, 1.0)


def test_a_miss_that_grows_with_the_number_is_no_seconds_of_samples():
    """Each step takes 48 seconds, with any number: replicas slow each other."""
    corrections = Corrections()
    for count in (2, 1) * 12:
        corrections.learn(partial(model, count), SAMPLES, 48.0, 48.0 * count)
    for count in (1, 2):
        expected = corrections.outcomes.expected(model(count, corrections.unforetold.seconds))
        assert expected.seconds == pytest.approx(48.0, rel=0.1)
        assert expected.replica_seconds == pytest.approx(48.0 * count, rel=0.1)
