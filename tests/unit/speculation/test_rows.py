"""Shows the invariants of `verl_fuse_speculation.rows`: what a pass does for all rows at once is what it would do for
one row after the other."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse_speculation.history import History
from verl_fuse_speculation.rows import KNOWN_TOKENS, NOTHING, OTHER, STAYS, Rows

LONGEST, END = 80, 5
SAMPLES = st.lists(st.lists(st.integers(3, 6), min_size=2, max_size=30), min_size=1, max_size=5)


def counted(*counts: int) -> np.ndarray:
    return np.array(counts, np.int64)


def table(rows: int, longest: int = LONGEST) -> Rows:
    found = Rows(longest, np.array([END]))
    found.fit(rows)
    return found


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.integers(1, 3), st.integers(0, 6))
def test_all_rows_at_once_are_one_row_after_the_other(samples, chunk, most):
    together, single = History(200), History(200)
    rows, ends = np.zeros((len(samples), LONGEST), np.int32), [-1] * len(samples)
    all_rows = table(len(samples))
    for row in range(len(samples)):
        all_rows.place(row, 0, -1, row % 2, 0, 0.0)
        all_rows.since[row] = 0
    for had in range(0, 30, chunk):
        new = [sample[had : had + chunk] for sample in samples]
        for row, tokens in enumerate(new):
            rows[row, had : had + len(tokens)] = tokens
        counts = counted(*map(len, new))
        lengths = counted(*(min(had + chunk, len(sample)) for sample in samples))
        all_rows.grow(together, rows, lengths, counts, 7)
        drafts = all_rows.draft(together, counts, most, 0.3)
        for row, tokens in enumerate(new):
            if tokens:
                ends[row] = single.add(np.array(tokens, np.int32), row % 2, 7, ends[row])
        for row, tokens in enumerate(new):
            expected, chance = single.draft(ends[row], 0, most) if tokens else ([], 0.0)
            cut = expected[: expected.index(END) + 1] if END in expected else expected
            assert (drafts[row], all_rows.tried[row]) == (cut, len(cut))
            assert all_rows.expected[row] == chance
    assert together.written == single.written
    for row, sample in enumerate(samples):
        assert np.frombuffer(all_rows.take(row), np.int32).tolist() == sample
        assert all_rows.take(row) == b""
        assert all_rows.known(row) == np.array(sample[-KNOWN_TOKENS:], np.int32).tobytes()


def test_a_sample_stays_where_its_tokens_are_and_only_there():
    history, found = History(500), table(4)
    rows = np.arange(4 * LONGEST, dtype=np.int32).reshape(4, LONGEST)
    # Row 0 is longer than the mark, row 1 shorter; row 2 is free, row 3 has no new tokens.
    for row, length in ((0, 40), (1, 7), (3, 5)):
        found.place(row, 0, -1, 0, 0, 0.0)
        found.grow(
            history, rows, counted(*(length if each == row else 0 for each in range(4))), counted(*np.eye(4)[row]), 0
        )
    lengths = counted(41, 8, 6, 5)

    def look(*counts: int, now: np.ndarray = lengths) -> tuple[bool, bool, list[int]]:
        return *found.look(rows, now, counted(*counts)), found.found.tolist()

    assert look(1, 1, 0, 0) == (True, False, [STAYS, STAYS, NOTHING, NOTHING])
    found.free(3)
    assert look(1, 1, 0, 0) == (False, False, [STAYS, STAYS, NOTHING, NOTHING])
    assert look(1, 1, 1, 0) == (True, False, [STAYS, STAYS, OTHER, NOTHING])
    # vLLM made a pass, or more, without asking.
    assert look(1, 1, 0, 0, now=counted(43, 8, 6, 5)) == (False, True, [STAYS, STAYS, NOTHING, NOTHING])
    # A sample of fewer tokens than were seen is another one.
    assert look(2, 1, 0, 0) == (True, False, [OTHER, STAYS, NOTHING, NOTHING])
    # The oldest token of the mark tells two samples apart, the one before it does not.
    rows[0, 40 - KNOWN_TOKENS - 1] = -1
    assert look(1, 1, 0, 0)[0] is False
    rows[0, 40 - KNOWN_TOKENS] = -1
    assert look(1, 1, 0, 0) == (True, False, [OTHER, STAYS, NOTHING, NOTHING])
    rows[1, 0] = -1
    assert look(1, 1, 0, 0)[2] == [OTHER, OTHER, NOTHING, NOTHING]


def test_no_draft_reaches_beyond_the_longest_sequence():
    history, found = History(500), table(1, longest=12)
    history.add(np.tile(np.array([7, 8, 9], np.int32), 8), 0, 0)
    again = np.tile(np.array([7, 8, 9], np.int32), 4)[None]
    found.place(0, 0, -1, 0, 0, 0.0)
    found.since[0] = 0
    lengths = []
    for length in range(6, 13):
        found.grow(history, again, counted(length), counted(1), 0)
        lengths.append(len(found.draft(history, counted(1), 4, 0.1)[0]))
    assert lengths == [4, 4, 3, 2, 1, 0, 0]
