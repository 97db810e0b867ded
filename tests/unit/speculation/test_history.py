"""Shows the invariants of `verl_fuse_speculation.history`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse_speculation.history import LONGEST, NODE_BYTES, History

FEW = st.integers(0, 3)
SAMPLES = st.lists(st.tuples(FEW, st.lists(FEW, min_size=1, max_size=30)), min_size=1, max_size=12)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def draft(history: History, end: int, most: int = 4, since: int = 0, least: float = 0.3) -> list[int]:
    return history.draft(end, since, most, least)[0]


def test_what_followed_before_is_drafted():
    history = History(100)
    history.add(tokens(1, 2, 3, 4, 5, 6), group=0, step=0)
    end = history.add(tokens(9, 2, 3), group=0, step=0)
    assert draft(history, end) == [4, 5, 6]
    assert draft(history, end, most=2) == [4, 5]
    assert draft(history, end, most=0) == []


def test_a_sample_that_grows_beside_another_is_drafted_from():
    history = History(100)
    one, other = (history.add(tokens(7, 8), group=0, step=0) for _ in range(2))
    for token in (1, 2, 3):
        one = history.add(tokens(token), group=0, step=0, end=one)
    other = history.add(tokens(1), group=0, step=0, end=other)
    assert draft(history, other) == [2, 3]


def test_the_longer_likeness_wins_over_more_votes():
    history = History(100)
    history.add(tokens(1, 2, 3, 4, 5), group=0, step=0)
    for _ in range(3):
        history.add(tokens(0, 9, 4, 6), group=0, step=0)
    end = history.add(tokens(1, 2, 3, 4), group=0, step=0)
    assert draft(history, end, most=1) == [5]


def test_a_split_vote_drafts_no_further_than_it_is_worth():
    history = History(200)
    for following in (5, 6, 7, 8):
        history.add(tokens(1, 2, 3, 4, following), group=0, step=0)
    end = history.add(tokens(1, 2, 3), group=0, step=0)
    assert draft(history, end, least=0.3) == [4]
    found, expected = history.draft(end, 0, 4, 0.2)
    assert found[0] == 4
    assert len(found) == 2
    assert expected == pytest.approx(1.25)


def test_older_steps_than_asked_for_are_not_drafted_from():
    history = History(100)
    history.add(tokens(1, 2, 3, 4), group=0, step=3)
    end = history.add(tokens(1, 2, 3), group=0, step=5)
    assert draft(history, end, since=3) == [4]
    assert draft(history, end, since=4) == []


def test_other_groups_are_drafted_from_where_the_own_knows_nothing():
    history = History(100)
    history.add(tokens(1, 2, 3, 4), group=0, step=0)
    end = history.add(tokens(1, 2, 3), group=1, step=0)
    assert draft(history, end) == [4]


def test_memory_is_what_was_asked_for():
    history = History.of_bytes(1 << 20)
    arrays = [value for value in vars(history).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == history.size * NODE_BYTES
    assert (1 << 20) - NODE_BYTES < history.size * NODE_BYTES <= 1 << 20
    history.add(np.arange(history.size * 2 + 3), group=0, step=0)
    assert [array.nbytes for array in arrays] == [
        value.nbytes for value in vars(history).values() if isinstance(value, np.ndarray)
    ]


def test_a_node_is_held_until_it_is_overwritten():
    history = History(16)
    end = history.add(tokens(1, 2, 3), group=0, step=0)
    history.add(np.zeros(13), group=0, step=0)
    assert history.holds(end)
    history.add(np.zeros(16), group=0, step=0)
    assert not history.holds(end)


@settings(max_examples=150, deadline=None)
@given(SAMPLES, st.integers(LONGEST, 200), st.lists(FEW, min_size=1, max_size=8))
def test_a_draft_is_what_followed_the_same_two_tokens_somewhere(samples, size, last):
    history = History(size)
    whole = [(group, np.array(found)) for group, found in samples]
    for group, found in whole:
        history.add(found, group, step=0)
    end = history.add(np.array(last), 0, step=0)
    found = draft(history, end, most=6, least=0.0)
    if len(last) == 1:
        assert found == []
    sequences = [found.tolist() for _, found in whole] + [last]
    for length in range(1, len(found) + 1):
        # The first token follows what the sample ends with, and all of them stand in a row in one sample.
        pattern = last[-2:] + found[:length]
        assert any(pattern == sequence[at : at + len(pattern)] for sequence in sequences for at in range(len(sequence)))


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_what_is_drafted_depends_on_what_was_added_alone(samples):
    def drafts() -> list[list[int]]:
        history, found = History(64), []
        for group, sample in samples:
            end = history.add(np.array(sample[:1]), group, 0)
            for token in sample[1:]:
                end = history.add(np.array([token]), group, 0, end)
                found.append(draft(history, end))
        return found

    assert drafts() == drafts()


@settings(max_examples=60, deadline=None)
@given(st.lists(FEW, min_size=1, max_size=60), st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_tokens_may_come_one_by_one_or_together(sample, cuts):
    one, other = History(256), History(256)
    end, other_end, at = -1, other.add(np.array(sample), 3, 0), 0
    for cut in cuts:
        end = one.add(np.array(sample[at : at + cut], np.int32), 3, 0, end)
        at += cut
    assert end == other_end
    assert one.draft(end, 0, 5) == other.draft(other_end, 0, 5)
