import argparse

import numpy as np
import pytest

from ci.bench.load import LONGEST, SAMPLES_PER_PROMPT, Meter, lengths, shape


def test_a_meter_counts_time_within_another_part_once():
    now = [0.0]
    meter = Meter(lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    inner = meter.of("migrate", spend)

    def outer():
        spend(2.0)
        inner(5.0)
        spend(1.0)

    meter.of("decide", outer)()
    assert dict(meter.seconds) == {"decide": 3.0, "migrate": 5.0}
    assert dict(meter.calls) == {"decide": 1, "migrate": 1}


def test_a_part_that_fails_is_counted():
    now = [0.0]
    meter = Meter(lambda: now[0])

    def fail():
        now[0] += 1.0
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        meter.of("poll", fail)()
    assert meter.seconds["poll"] == 1.0
    meter.of("poll", lambda: None)()
    assert meter.seconds["poll"] == 1.0, "nothing is open any more"


def test_lengths_are_long_tailed_and_the_longest_is_there():
    found = lengths(1024, 0)
    assert found.shape == (1024 // SAMPLES_PER_PROMPT, SAMPLES_PER_PROMPT)
    assert found.max() == LONGEST
    assert np.median(found) < found.mean() / 1.5
    assert (found == lengths(1024, 0)).all()
    assert (found != lengths(1024, 1)).any()


def test_a_shape_is_replicas_and_samples():
    assert shape("64x8192") == (64, 8192)
    for text in ("1x64", "8x1001"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            shape(text)
