"""What trials show, in figures and one sentence."""

import pytest

from verl_fuse.tune.answer import NOTHING, answer
from verl_fuse.tune.trial import Outcome, Trial

A, B = ("a=1",), ("b=1",)


def trial(overrides: tuple[str, ...], *seconds: float, turn: int = 0) -> Trial:
    kind = "measured" if seconds else "crashed"
    return Trial(overrides, Outcome(kind, seconds), took=60.0, turn=turn)


def test_finals_alone_decide_and_their_interval_is_known():
    # Trial and base of the search say 0.2, the finals 0.5.
    made = [trial((), 10.0, 10.0), trial(A, 2.0, 2.0)]
    finals = [trial((), 4.0, 4.2, 3.8, turn=1), trial(A, 2.0, 2.2, 1.8, turn=1)]
    found = answer([*made, *finals])
    assert found.overrides == A
    assert (found.base.value, found.best.value) == (pytest.approx(4.0), pytest.approx(2.0))
    assert found.ratio.value == pytest.approx(2.0)
    assert 1 < found.ratio.low < 2 < found.ratio.high
    assert found.verdict.startswith("steps are 2.00 [")


def test_nothing_is_better_where_the_finals_do_not_show_it():
    made = [trial((), 10.0, 10.0), trial(A, 9.0, 9.0)]
    finals = [trial((), 8.0, 12.0, 10.0, turn=1), trial(A, 12.0, 8.0, 9.5, turn=1)]
    found = answer([*made, *finals])
    assert found.overrides == ()
    assert (found.ratio.value, found.ratio.low, found.ratio.high) == (1.0, 1.0, 1.0)
    assert found.best == found.base
    assert found.verdict.startswith(f"{NOTHING}: measured again in turn, the fastest finalist was 1.02 [")


def test_a_finalist_that_is_slower_in_the_finals_is_no_answer():
    finals = [trial((), 2.0, 2.1, 1.9, turn=1), trial(A, 3.0, 3.1, 2.9, turn=1)]
    assert answer([trial((), 9.0, 9.0), trial(A, 2.0, 2.0), *finals]).overrides == ()


def test_nothing_is_better_where_no_trial_was_faster():
    found = answer([trial((), 2.0, 2.0), trial(A, 1.99, 1.99), trial(B)])
    assert (found.overrides, found.verdict) == ((), f"{NOTHING}: none of 2 other trials was faster by 2%")
    assert answer([trial((), 2.0, 2.0)]).verdict == f"{NOTHING}: the base alone was tried"


def test_without_finals_the_fastest_is_the_answer_and_the_sentence_says_so():
    found = answer([trial((), 4.0, 4.0), trial(A, 3.0, 3.0), trial(B, 2.0, 2.0)], interrupted=True)
    assert found.overrides == B
    assert found.verdict == (
        "ended before all trials were made; the fastest trial was 2.00 [2.00, 2.00] times as fast as the base; it was "
        "not measured again"
    )


def test_without_finals_a_gain_that_noise_may_explain_is_no_answer():
    found = answer([trial((), 4.0, 5.0, 3.0), trial(A, 3.0, 3.5, 4.0)])
    assert found.overrides == ()
    assert found.verdict.startswith(f"{NOTHING}: the fastest trial was 1.14 [")
    assert found.verdict.endswith("and noise may be the reason; it was not measured again")
    # One that can be told from noise wins over one that seems faster.
    found = answer([trial((), 4.0, 5.0, 3.0), trial(A, 1.0, 4.5, 3.0), trial(B, 3.2, 4.0, 2.4)])
    assert found.overrides == B


def test_what_replays_save_is_taken_from_the_steps_of_the_base():
    replays = [
        Trial(overrides, Outcome("measured", seconds), took=60.0, replayed=True)
        for overrides, seconds in (((), (4.0, 3.0, 3.5)), (A, (1.0, 0.5, 0.75)))
    ]
    found = answer([trial((), 6.0, 5.0, 5.5), *replays])
    assert found.overrides == A
    assert (found.base.value, found.best.value) == (pytest.approx(5.5), pytest.approx(2.75))


def test_finals_of_replays_are_compared_with_the_steps_that_they_repeat():
    """What a replay saves counts of the step that was recorded for it, whatever other lengths the search had."""

    def replay(overrides: tuple[str, ...], turn: int, *seconds: float) -> Trial:
        kind = "measured" if seconds else "crashed"
        return Trial(overrides, Outcome(kind, seconds), took=60.0, turn=turn, replayed=True)

    made = [trial((), 60.0, 50.0), replay((), 0, 4.0, 3.0), replay(A, 0, 1.0, 0.5)]
    first = [trial((), 6.0, 7.0, 9.0, turn=1), replay((), 1, 4.0, 5.0, 6.0), replay(A, 1, 1.0, 2.0, 2.0)]
    second = [replay(A, 2, 2.0, 1.0, 3.0), replay((), 2, 4.0, 5.0, 6.0)]
    found = answer([*made, *first])
    assert (found.overrides, found.base.value, found.best.value) == (A, pytest.approx(22 / 3), pytest.approx(4.0))
    found = answer([*made, *first, *second])
    assert (found.base.value, found.best.value) == (pytest.approx(22 / 3), pytest.approx(25 / 6))
    assert found.ratio.value == pytest.approx(44 / 25)
    # The steps are no more than there are, however often they were replayed.
    assert found.ratio.low == pytest.approx(answer([*made, first[0], first[1], replay(A, 1, 1.5, 1.5, 2.5)]).ratio.low)
    # A base whose replay failed is compared with nothing.
    assert "not measured again" in answer([*made, first[0], replay((), 1), first[2]]).verdict


def test_the_finalist_of_both_turns_wins_over_one_that_was_fast_in_one():
    made = [trial((), 9.0, 9.0), trial(A, 2.0, 2.0), trial(B, 3.0, 3.0)]
    first = [trial((), 4.0, 4.0, turn=1), trial(A, 1.0, 1.0, turn=1), trial(B, 1.9, 2.1, turn=1)]
    second = [trial(B, 2.1, 1.9, turn=2), trial((), 4.0, 4.0, turn=2)]
    found = answer([*made, *first, *second])
    assert (found.overrides, found.ratio.value) == (B, pytest.approx(2.0))


def test_a_turn_in_which_the_base_failed_counts_for_nothing():
    made = [trial((), 4.0, 4.0), trial(A, 2.0, 2.0), trial((), turn=1), trial(A, 1.0, 1.0, turn=1)]
    assert "not measured again" in answer(made).verdict
