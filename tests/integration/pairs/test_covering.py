"""The covering array: every pair that is not refused is in a row, none that is refused is."""

from itertools import product

import pytest
from covering import all_pairs, covering_rows, pairs_of

NAMES = {"a": ["a0", "a1", "a2"], "b": ["b0", "b1"], "c": ["c0", "c1", "c2", "c3"], "d": ["d0", "d1"]}


def covered(rows):
    return {pair for row in rows for pair in pairs_of(row, NAMES)}


def test_every_pair_is_in_a_row():
    rows = covering_rows(NAMES, ())
    assert covered(rows) == set(all_pairs(NAMES))
    assert len(rows) < len(list(product(*NAMES.values()))) / 2
    assert all(list(row) == list(NAMES) for row in rows)


def test_a_refused_pair_is_in_no_row_and_all_others_are():
    refused = {(("a", "a1"), ("c", "c3")), (("a", "a2"), ("d", "d1")), (("b", "b1"), ("c", "c0"))}
    rows = covering_rows(NAMES, refused)
    assert covered(rows) == set(all_pairs(NAMES)) - refused


def test_the_same_input_makes_the_same_rows():
    assert covering_rows(NAMES, ()) == covering_rows(NAMES, ())


def test_rows_cover_less_and_less_and_the_last_ones_are_plain():
    rows, seen, gains = covering_rows(NAMES, ()), set(), []
    for row in rows:
        new = set(pairs_of(row, NAMES)) - seen
        gains.append(len(new))
        seen |= new
    assert gains[0] == 6
    assert gains[-1] < gains[0]


def test_rows_that_are_begun_come_first_with_their_values():
    begun = [{"a": "a2", "d": "d1"}, {"b": "b1"}]
    rows = covering_rows(NAMES, (), begun)
    assert [{name: row[name] for name in start} for start, row in zip(begun, rows, strict=False)] == begun
    assert covered(rows) == set(all_pairs(NAMES))


def test_refusals_that_leave_no_row_are_an_error():
    refused = {(("a", "a1"), ("b", value)) for value in NAMES["b"]}
    with pytest.raises(ValueError, match="no value of b fits"):
        covering_rows(NAMES, refused)
