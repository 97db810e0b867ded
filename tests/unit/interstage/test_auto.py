import numpy as np
import pytest
from rollouts import generated, timeline

from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Span
from verl_fuse_interstage.auto import AutoThreshold

# Ninety short samples and ten long ones, dealt out to four replicas.
TAIL = [20] * 90 + [400] * 10
FLAT = [60] * 100
REPLICAS, SLOTS, LONGEST = 4, 32, 512
CAPACITY = Capacity(SLOTS, SLOTS * LONGEST)
STEP = {"math": 100}


def step(lengths, inference=20.0):
    """(timeline, lengths by data set) of a step of the data set "math" whose slices were busy for `inference` seconds
    in all, after generation."""
    spans = [s for r in range(REPLICAS) for s in generated(lengths[r::REPLICAS], SLOTS, 0.02, 0.0005, r)]
    end = max(span.end for span in spans)
    spans += [
        Span("micro-group", f"lane slice {r}", "inference", end, end + inference / REPLICAS, {"micro_group": r})
        for r in range(REPLICAS)
    ]
    return timeline(*spans), {"math": [(9, length) for length in lengths]}


def learned(*steps):
    """After these, and a first one without samples, in which everything was cold."""
    auto = AutoThreshold(REPLICAS, CAPACITY, LONGEST)
    auto.learn(step(FLAT)[0], {})
    for found in steps:
        auto.learn(*found)
    return auto


def test_before_anything_is_measured_nothing_is_chosen():
    assert AutoThreshold(REPLICAS, CAPACITY, LONGEST).choose(STEP, 1) is None


def test_a_long_tail_migrates_and_the_gain_is_foretold():
    chosen = learned(step(TAIL)).choose(STEP, 1)
    assert 0 < chosen.threshold <= 40
    assert 1 <= chosen.survivors < REPLICAS
    assert chosen.seconds < 0.95 * chosen.stock_seconds


def test_the_first_step_pays_for_warming_up_and_decides_nothing():
    cold, lengths = step(TAIL, inference=500.0)
    auto = AutoThreshold(REPLICAS, CAPACITY, LONGEST)
    auto.learn(cold, lengths)
    assert auto.choose(STEP, 1) is None, "lengths are known, costs are not"
    auto.learn(*step(FLAT))
    chosen = auto.choose(STEP, 1)
    auto.learn(*step(FLAT))
    assert chosen.stock_seconds == pytest.approx(auto.choose(STEP, 1).stock_seconds, rel=0.2), "of the warm steps only"


DRAFTS = {
    "fuse/speculation_pass_seconds": 0.02,
    "fuse/speculation_token_seconds": 0.0005,
    "fuse/speculation_tail_tokens_per_pass": 4.0,
    "fuse/speculation_tail_acceptance": 0.5,
}


def test_a_tail_that_decodes_faster_with_drafts_is_priced_so():
    timeline, lengths = step(TAIL)
    plain, drafted = learned((timeline, lengths)), learned((timeline, lengths, DRAFTS))
    slow, fast = plain.choose(STEP, 1), drafted.choose(STEP, 1)
    # Few are left for long: 6 drafted tokens of each cost little beside a pass, and three of them are accepted.
    assert fast.stock_seconds < 0.7 * slow.stock_seconds
    known = drafted.learned.drafted
    assert known.drafted == 6
    assert known.seconds(np.array([1.0, 1000.0])) == pytest.approx([(0.02 + 0.0035) / 4, 0.02 + 0.5])
    drafted.learn(timeline, lengths)
    assert drafted.learned.drafted == known, "a step that counted nothing changes nothing"


def test_without_a_tail_or_without_inference_nothing_migrates():
    assert learned(step(FLAT)).choose(STEP, 1).threshold == 0
    assert learned(step(TAIL, inference=1e-6)).choose(STEP, 1).threshold == 0


def streaming(*steps, infers=False):
    """As `learned`, for a run whose updates are streamed."""
    auto = AutoThreshold(REPLICAS, CAPACITY, LONGEST, infers=infers, streams=True)
    for found in steps:
        auto.learn(*found)
    return auto


def updated(lengths, seconds=20.0, each=10):
    """A step without inference; an update of so many replica-seconds, a quarter of it streamed on rank 1 before. Long
    samples are of the same prompts."""
    generation, found = step(lengths, inference=0.0)
    spans = [span for span in generation.spans if span.category != "inference"]
    end = max(span.end for span in spans)
    spans += [Span("stream_update", "rank 1", "train", end - seconds / 4, end)]
    spans += [Span("update_actor", f"rank {r}", "train", end, end + seconds * 3 / 16) for r in range(REPLICAS)]
    spans += [Span("update_actor", "step", "stage", end, end + seconds * 3 / 16)]
    return timeline(*spans), found


def test_a_streamed_update_is_priced_where_nothing_is_inferred():
    auto = streaming((step(FLAT)[0], {}), updated(TAIL))
    tokens = sum(TAIL) + 9 * len(TAIL)
    assert auto.learned.update == pytest.approx(20.0 / tokens)
    chosen = auto.choose(STEP, 10)
    assert 0 < chosen.threshold <= 40
    assert chosen.seconds < 0.95 * chosen.stock_seconds
    # Alone, each sample would wait for nobody; in groups of ten with a long one each, none is complete early.
    mixed = streaming((step(FLAT)[0], {}), updated([*[20] * 9, 400] * 10)).choose(STEP, 10)
    assert mixed.threshold == 0
    assert streaming((step(FLAT)[0], {}), updated(FLAT)).choose(STEP, 10).threshold == 0


def test_before_an_update_is_measured_nothing_is_chosen():
    assert streaming((step(FLAT)[0], {}), step(TAIL), infers=True).choose(STEP, 10) is None
    assert streaming((step(FLAT)[0], {}), updated(TAIL), infers=True).choose(STEP, 10) is None


def test_prompts_are_drawn_whole():
    auto = streaming(step([*[10] * 10, *[300] * 10] * 5))
    drawn = auto._draw(STEP, 10).response.reshape(-1, 10)
    assert drawn.shape == (10, 10)
    assert (drawn == drawn[:, :1]).all()


def test_the_prediction_for_stock_is_the_step_that_was_measured():
    measured, lengths = step(TAIL)
    chosen = learned((measured, lengths)).choose(STEP, 1)
    assert chosen.stock_seconds == pytest.approx(measured.end, rel=0.25)


def test_recent_steps_count_more():
    auto = learned(step([10] * 100), step([300] * 100))
    drawn = auto._draw({"math": 20000})
    # 1 against 0.7
    assert np.mean(drawn.response == 300) == pytest.approx(1 / 1.7, abs=0.02)
    assert set(drawn.response) == {10, 300}


def test_data_sets_are_kept_apart_and_a_new_one_is_like_any():
    auto = learned(step([10] * 100))
    auto.learn(timeline(), {"code": [(9, 300)] * 50})
    drawn = auto._draw({"math": 300, "code": 100}).response.tolist()
    assert (drawn.count(10), drawn.count(300)) == (300, 100)
    assert drawn != sorted(drawn)
    assert set(auto._draw({"prose": 100}).response) == {10, 300}
    # Nothing of "math" was seen in between: its lengths have not aged.
    auto.learn(*step([20] * 100))
    assert np.mean(auto._draw({"math": 20000}).response == 20) == pytest.approx(1 / 1.7, abs=0.02)


def test_a_step_without_samples_teaches_nothing():
    auto = learned(step(TAIL))
    auto.learn(timeline(), {})
    assert auto.choose(STEP, 1).threshold > 0
