import numpy as np
import pytest
from rollouts import generated, timeline

from verl_fuse.spec.timeline import Span
from verl_fuse_interstage.auto import AutoThreshold

# Ninety short samples and ten long ones, dealt out to four replicas.
TAIL = [20] * 90 + [400] * 10
FLAT = [60] * 100
REPLICAS, SLOTS, LONGEST = 4, 32, 512


def step(lengths, inference=20.0):
    """(timeline, lengths) of a step whose slices were busy for `inference` seconds in all, after generation."""
    spans = [s for r in range(REPLICAS) for s in generated(lengths[r::REPLICAS], SLOTS, 0.02, 0.0005, r)]
    end = max(span.end for span in spans)
    spans += [
        Span("micro-group", f"lane slice {r}", "inference", end, end + inference / REPLICAS, {"micro_group": r})
        for r in range(REPLICAS)
    ]
    return timeline(*spans), [(9, length) for length in lengths]


def learned(*steps):
    auto = AutoThreshold(REPLICAS, SLOTS, LONGEST)
    for found in steps:
        auto.learn(*found)
    return auto


def test_before_anything_is_measured_nothing_is_chosen():
    assert AutoThreshold(REPLICAS, SLOTS, LONGEST).choose(100) is None


def test_a_long_tail_migrates_and_the_gain_is_foretold():
    chosen = learned(step(TAIL)).choose(100)
    assert 0 < chosen.threshold <= 40
    assert 1 <= chosen.survivors < REPLICAS
    assert chosen.seconds < 0.95 * chosen.stock_seconds


def test_without_a_tail_or_without_inference_nothing_migrates():
    assert learned(step(FLAT)).choose(100).threshold == 0
    assert learned(step(TAIL, inference=1e-6)).choose(100).threshold == 0


def test_the_prediction_for_stock_is_the_step_that_was_measured():
    measured, lengths = step(TAIL)
    chosen = learned((measured, lengths)).choose(100)
    assert chosen.stock_seconds == pytest.approx(measured.end, rel=0.25)


def test_recent_steps_count_more():
    auto = learned(step([10] * 100), step([300] * 100))
    drawn = auto._draw(20000)
    # 1 against 0.7
    assert np.mean(drawn.response == 300) == pytest.approx(1 / 1.7, abs=0.02)
    assert set(drawn.response) == {10, 300}


def test_a_step_without_samples_teaches_nothing():
    auto = learned(step(TAIL))
    auto.learn(timeline(), [])
    assert auto.choose(100).threshold > 0
