"""Micro-batches of the rows that a lean update computes: the invariants in the docstring of the module."""

import random
from contextlib import suppress

import pytest

pytest.importorskip("verl")
from verl_fuse.host.sharing.micro_batches import by_rows, by_tokens


def all_ranks(split, *ranks):
    """Return the micro-batches of each rank where every rank's proposal is the largest in turn: ranks in lockstep, one
    agreement after the other."""
    agreed: list[int] = []
    while True:
        asked: list[list[int]] = []

        def largest(number, place, mine):
            mine.append(number)
            if place[0] < len(agreed):
                place[0] += 1
                return agreed[place[0] - 1]
            raise StopIteration

        found = []
        for rank in ranks:
            mine: list[int] = []
            place = [0]
            with suppress(StopIteration):
                found.append(split(rank, lambda number, place=place, mine=mine: largest(number, place, mine)))
            asked.append(mine)
        if len(found) == len(ranks):
            return found
        assert len({len(mine) for mine in asked}) == 1, "every rank takes part in every agreement"
        agreed.append(max(mine[-1] for mine in asked))


def test_rows_are_dealt_out_evenly_and_ranks_have_as_many_micro_batches():
    found = all_ranks(lambda count, largest: by_rows(count, 4, largest), 9, 2, 0)
    assert found == [[[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[], [0], [1]], [[], [], []]]


def test_nothing_left_is_one_empty_micro_batch():
    assert all_ranks(lambda count, largest: by_rows(count, 4, largest), 0, 0) == [[[]], [[]]]
    assert all_ranks(lambda lengths, largest: by_tokens(lengths, 10, largest), [], []) == [[[]], [[]]]


def test_their_number_is_a_multiple_of_what_the_pipeline_needs():
    found = all_ranks(lambda count, largest: by_rows(count, 2, largest, 4), 9, 1)
    assert [len(parts) for parts in found] == [8, 8]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_stay_below_the_limit_and_no_row_is_lost(seed):
    draw = random.Random(seed)
    ranks = [[draw.randint(1, 40) for _ in range(draw.randint(0, 12))] for _ in range(3)]
    multiple = draw.choice([1, 3])
    found = all_ranks(lambda lengths, largest: by_tokens(lengths, 40, largest, multiple), *ranks)
    assert len({len(parts) for parts in found}) == 1
    assert len(found[0]) % multiple == 0
    for lengths, parts in zip(ranks, found, strict=True):
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in part) <= 40 for part in parts)
