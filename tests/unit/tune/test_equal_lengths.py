"""Live trials are compared at equal lengths of their responses."""

import random

import numpy as np
import pytest

from verl_fuse.compare.intervals import ratio
from verl_fuse.tune.lengths import at_equal_lengths
from verl_fuse.tune.pairs import between, paired
from verl_fuse.tune.trial import Outcome, Trial

A, B = ("a=1",), ("b=1",)
# A step takes so many seconds at one token, times these powers of its mean and its longest response.
POWERS = (0.2, 0.3)


def trial(
    overrides=(), level=1.0, *, steps=4, seed=0, noise=0.0, of_step=(), replayed=False, known=True, powers=POWERS
) -> Trial:
    """A trial whose step number n takes `of_step[n]` times as long as any other, whatever its lengths."""
    draw = random.Random(seed)
    lengths = [(mean := draw.lognormvariate(3.0, 0.3), mean * draw.lognormvariate(1.5, 0.4)) for _ in range(steps)]
    slow = [*of_step, *[1.0] * (steps - len(of_step))]
    taken = tuple(
        level * one ** powers[0] * most ** powers[1] * draw.lognormvariate(0.0, noise) * slower
        for (one, most), slower in zip(lengths, slow, strict=True)
    )
    return Trial(overrides, Outcome("measured", taken, lengths=tuple(lengths) if known else ()), 60.0, 0, replayed)


def of(*levels: float, **options) -> list[Trial]:
    return [trial((f"a={n}",), level, seed=n, **options) for n, level in enumerate(levels)]


def test_lengths_make_no_difference_and_levels_stay():
    base, other, third = (each.outcome.seconds for each in at_equal_lengths(of(1.0, 0.8, 1.1)))
    assert base == pytest.approx([base[0]] * 4)
    assert np.divide(other, base) == pytest.approx([0.8] * 4)
    assert np.divide(third, base) == pytest.approx([1.1] * 4)
    assert between(paired(of(1.0, 0.8, 1.1), ("a=0",), ("a=1",))).value == pytest.approx(0.8)


def test_prompts_that_make_a_step_slow_for_all_are_no_noise():
    plain, slow = (of(1.0, 0.8, 1.1, noise=0.05, of_step=each) for each in ((), (1.5, 1.0, 0.7)))
    found, same = (between(paired(made, ("a=0",), ("a=1",))) for made in (plain, slow))
    assert (found.value, found.low, found.high) == pytest.approx((same.value, same.low, same.high), rel=1e-6)


def test_replays_failures_and_unknown_lengths_stay_as_they_are():
    others = [
        trial(A, seed=13, replayed=True),
        trial(B, seed=14, known=False),
        Trial(A, Outcome("crashed", reason="so"), 60.0),
    ]
    live = of(1.0, 0.8, 1.1)
    found = at_equal_lengths([live[0], *others, *live[1:]])
    assert found[1:4] == others
    assert [found[0], *found[4:]] == at_equal_lengths(live) != live


@pytest.mark.parametrize(
    ("steps", "fitted"),
    [((8,), False), ((3, 3), False), ((4, 4), False), ((5, 5), True), ((3, 3, 3), True), ((3, 3, 2), False)],
)
def test_few_steps_fit_nothing(steps: tuple[int, ...], fitted: bool):
    made = [trial((f"a={number}",), steps=each, seed=number) for number, each in enumerate(steps)]
    assert (at_equal_lengths(made) != made) is fitted


def test_longer_responses_save_no_time():
    falling = of(1.0, 1.0, 1.0, powers=(-0.3, -0.2))
    found = at_equal_lengths(falling)
    levels = [[np.log(each.outcome.seconds).mean() for each in made] for made in (falling, found)]
    assert np.diff(levels[0]) == pytest.approx(np.diff(levels[1]))


@pytest.mark.parametrize(("powers", "left"), [((3.0, 0.0), 2.0), ((2.0, 0.0), 1.0), ((1.0, 0.0), 0.0)])
def test_no_step_costs_more_than_in_proportion_to_its_lengths(powers, left):
    made = of(1.0, 1.0, 1.0, powers=powers)
    means = [np.log([one for one, _ in each.outcome.lengths]).mean() for each in made]
    found = [np.log(each.outcome.seconds).mean() for each in at_equal_lengths(made)]
    assert np.diff(found) == pytest.approx(left * np.diff(means), abs=1e-6)


def test_responses_of_twice_the_length_excuse_twice_the_seconds_and_no_more():
    base, others = trial(seed=1, powers=(1.0, 1.0)), of(1.0, 1.0, powers=(1.0, 1.0))
    longer = tuple((2 * one, 2 * most) for one, most in base.outcome.lengths)
    taken = tuple(4 * each for each in base.outcome.seconds)
    slow = Trial(A, Outcome("measured", taken, lengths=longer), 60.0)
    found = at_equal_lengths([base, slow, *others])
    assert np.divide(found[1].outcome.seconds, found[0].outcome.seconds).mean() == pytest.approx(2.0, rel=0.05)


def test_one_length_for_all_is_no_fault():
    seconds, lengths = (1.0, 2.0, 3.0, 2.0), ((5.0, 9.0),) * 4
    made = [Trial((f"a={n}",), Outcome("measured", seconds, lengths=lengths), 60.0) for n in range(3)]
    base, *others = (each.outcome.seconds for each in at_equal_lengths(made))
    assert [np.divide(each, base) for each in others] == [pytest.approx([1.0] * 4)] * 2


@pytest.mark.parametrize("others", [1, 4])
def test_intervals_cover_and_are_narrower(others: int):
    covered, narrower, rounds = 0, 0, 400
    for number in range(rounds):
        seeds = [number * 10 + each for each in range(others + 2)]
        made = [trial((f"a={n}",), steps=3, seed=seed, noise=0.07) for n, seed in enumerate(seeds)]
        found, raw = between(paired(made, ("a=0",), ("a=1",))), ratio(*(each.outcome.seconds for each in made[:2]))
        covered += found.holds(1.0)
        narrower += found.high / found.low < raw.high / raw.low
    assert covered >= 0.93 * rounds
    assert narrower >= 0.7 * rounds
