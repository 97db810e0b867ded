import random

import pytest

from verl_fuse.host.rollout.lengths import LengthTotals, SequenceLengths
from verl_fuse.spec.step import Capacity

LIMIT = 16384
PROMPT = 10
STEP = [(PROMPT, 20)] * 30 + [(PROMPT, 200)] * 10


def lengths(*steps, limit=LIMIT):
    found = SequenceLengths(limit)
    for step in steps:
        found.learn(step)
    return found


def test_while_nothing_is_known_a_sequence_may_be_as_long_as_the_limit():
    assert lengths().predict(40) == LIMIT
    assert lengths([]).predict(40) == LIMIT


def test_what_is_left_is_as_long_as_the_longest_share_of_recent_steps():
    known = lengths(STEP)
    assert known.predict(40) == PROMPT + (30 * 20 + 10 * 200) / 40
    assert known.predict(10, LengthTotals.of([(PROMPT, 20)] * 30)) == PROMPT + 200
    assert known.predict(20, LengthTotals.of([(PROMPT, 20)] * 20)) == PROMPT + (10 * 20 + 10 * 200) / 20
    # Half as many samples: the last five are of the same share.
    assert known.predict(5, LengthTotals.of([(PROMPT, 20)] * 15)) == PROMPT + 200


def test_four_steps_count():
    assert lengths(*[[(PROMPT, 500)] * 40] * 3, *[STEP] * 4).predict(40) == lengths(STEP).predict(40)


def test_before_a_step_was_seen_lifetimes_without_memory_are_foretold():
    rng = random.Random(0)
    errors = []
    for _ in range(200):
        drawn = sorted(1 + int(rng.expovariate(1 / 120)) for _ in range(64))
        finished, left = drawn[:48], drawn[48:]
        predicted = lengths().predict(16, LengthTotals.of([(PROMPT, tokens) for tokens in finished]))
        errors.append(predicted - PROMPT - sum(left) / 16)
    assert abs(sum(errors)) / len(errors) < 5


def test_a_predictor_that_says_more_is_believed():
    finished = LengthTotals.of([(PROMPT, 20)] * 30)
    assert lengths(STEP).predict(10, finished, response=300.0) == PROMPT + 300
    assert lengths(STEP).predict(10, finished, response=50.0) == PROMPT + 200


@pytest.mark.parametrize("steps", [(), (STEP,)])
def test_no_prediction_is_above_the_limit(steps):
    assert lengths(*steps, limit=100).predict(10, LengthTotals.of([(PROMPT, 80)] * 30), response=300.0) == 100


def test_a_replica_has_room_for_as_many_as_its_engine_runs_and_its_kv_cache_holds():
    assert Capacity(64).room(200.0) == 64
    assert Capacity(64, 32800).room(200.0) == 64
    assert Capacity(64, 3280).room(200.0) == 16
    assert Capacity(64, 3280).room(16400) == 1
