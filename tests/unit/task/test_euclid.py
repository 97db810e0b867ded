import math

import numpy as np
import pytest

from verl_fuse_cpu.task.euclid import Pair, all_pairs, draw, held_out, long_tailed_weights
from verl_fuse_cpu.task.parameters import Parameters


def test_a_trace_subtracts_until_both_numbers_are_equal():
    assert Pair(7, 3).prompt == "gcd 07 03"
    assert Pair(7, 3).trace == "04 03;01 03;01 02;01 01;=01"
    assert Pair(12, 18).trace == "12 06;06 06;=06"


def test_the_last_line_of_every_trace_holds_the_answer_twice():
    for pair in all_pairs(60):
        answer = f"{math.gcd(pair.a, pair.b):02d}"
        assert pair.lines[-1] == f"{answer} {answer}"
        assert pair.trace.endswith(f"={answer}")


def test_validation_pairs_are_never_trained_on_and_nothing_is_lost():
    kept, unseen = held_out(all_pairs(60), seed=0)
    assert (len(kept), len(unseen)) == (2832, 708)
    assert not set(kept) & set(unseen)


def test_difficulty_weights_follow_the_power_law():
    pairs = all_pairs(10)
    weights = long_tailed_weights(pairs, exponent=2.0)
    mass = {k: weights[[len(pair.lines) == k for pair in pairs]].sum() for k in (1, 2, 4)}
    assert weights.sum() == pytest.approx(1.0)
    assert mass[1] / mass[2] == pytest.approx(4.0)
    assert mass[2] / mass[4] == pytest.approx(4.0)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_trace_lengths_are_long_tailed(part):
    parameters = Parameters()
    pairs = held_out(all_pairs(parameters.largest), parameters.seed)[part == "validation"]
    count = parameters.validation if part == "validation" else parameters.train
    # Tokens: four a line, two for the answer, one for the end.
    tokens = [4 * len(pair.lines) + 3 for pair in draw(pairs, count, parameters.tail_exponent, parameters.seed)]
    assert np.percentile(tokens, 99) >= 5 * np.median(tokens)
    assert max(tokens) <= 240


def test_the_seed_decides_the_problems():
    pairs = all_pairs(20)
    assert draw(pairs, 50, 1.5, seed=3) == draw(pairs, 50, 1.5, seed=3)
    assert draw(pairs, 50, 1.5, seed=3) != draw(pairs, 50, 1.5, seed=4)
