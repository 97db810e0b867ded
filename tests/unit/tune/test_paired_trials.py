"""Which seconds of two configurations are compared, and what counts as a gain."""

import pytest

from verl_fuse.compare.intervals import Interval
from verl_fuse.tune.pairs import between, fastest, gains, paired, sure, whole_steps
from verl_fuse.tune.trial import Outcome, Overrides, Trial

A, B = ("a=1",), ("b=1", "c=1")


def trial(overrides: Overrides, *seconds: float, turn: int = 0, replayed: bool = False) -> Trial:
    kind = "measured" if seconds else "crashed"
    return Trial(overrides, Outcome(kind, seconds), took=60.0, turn=turn, replayed=replayed)


def test_trials_of_one_length_are_compared_step_by_step_and_finals_not_at_all():
    made = [trial((), 4.0, 5.0), trial(A, 2.0, 3.0), trial((), 4.1, 5.1, 4.6), trial(A, 2.1, 3.1, 2.6)]
    assert paired(made, (), A) == [(4.0, 2.0), (5.0, 3.0), (4.1, 2.1), (5.1, 3.1), (4.6, 2.6)]
    assert paired([*made[:2], trial(A, 9.0, 9.0, turn=1)], (), A) == [(4.0, 2.0), (5.0, 3.0)]


def test_where_no_length_is_common_the_first_steps_are():
    assert paired([trial((), 4.0, 5.0), trial(A, 2.0, 3.0, 1.0)], (), A) == [(4.0, 2.0), (5.0, 3.0)]


def test_replayed_steps_are_compared_with_replayed_ones():
    made = [trial((), 4.0, 5.0), trial(A, 2.0, 3.0, replayed=True), trial((), 3.0, 4.0, replayed=True)]
    assert paired(made, (), A) == []
    assert paired(made, (), A, replayed=True) == [(3.0, 2.0), (4.0, 3.0)]
    # The whole step takes what the replays save less; never less than the replay itself.
    assert whole_steps(made, A) == [(4.0, 3.0), (5.0, 4.0)]
    assert whole_steps([trial((), 3.0), *made[1:]], A) == [(3.0, 2.0)]


def test_the_order_of_overrides_is_no_difference():
    assert paired([trial((), 4.0), trial(B, 2.0)], (), B[::-1]) == [(4.0, 2.0)]


def test_one_that_was_not_measured_has_no_pairs():
    assert paired([trial((), 4.0), trial(A)], (), A) == whole_steps([trial((), 4.0), trial(A)], A) == []


def test_a_gain_is_sure_only_where_its_interval_lies_below_one():
    assert (gains(Interval(0.9, 0.8, 1.1)), sure(Interval(0.9, 0.8, 1.1))) == (True, False)
    assert (gains(Interval(0.9, 0.8, 0.99)), sure(Interval(0.9, 0.8, 0.99))) == (True, True)
    assert (gains(Interval(0.99, 0.985, 0.995)), sure(Interval(0.99, 0.985, 0.995))) == (False, False)
    # Of one step there is no interval.
    assert not sure(between([(4.0, 2.0)]))
    # Steps of many lengths, each a fifth shorter: their differences are no noise.
    assert sure(between([(4.0, 3.2), (8.0, 6.4), (2.0, 1.6)]))


def test_the_fastest_are_those_that_gained_in_the_search():
    made = [trial((), 4.0, 4.0), trial(A, 3.0, 3.0), trial(B, 2.0, 2.0), trial(("d=1",), 3.99, 3.99)]
    assert fastest([*made, trial(("e=1",), 1.0, 1.0, turn=1), trial(("f=1",))]) == [B, A]
    assert between(whole_steps(made, B)).value == pytest.approx(0.5)
