"""Micro-batches of rows: the invariants in the docstring of the module."""

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


def computed(lengths, prompts, part):
    """The tokens that are computed for these rows: what rows of a prompt share counts once."""
    own = sum(lengths[row] - prompts[row][1] for row in part)
    return own + sum(dict(prompts[row] for row in part).values())


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_prompt_stay_together_as_long_as_a_micro_batch_holds_them(seed):
    draw = random.Random(seed)
    ranks = []
    for _ in range(3):
        groups = [group for group in range(draw.randint(0, 4)) for _ in range(draw.randint(1, 6))]
        draw.shuffle(groups)
        shared = {group: draw.randint(0, 20) for group in groups}
        lengths = [shared[group] + draw.randint(1, 15) for group in groups]
        ranks.append((lengths, [(group, shared[group]) for group in groups]))
    found = all_ranks(lambda rank, largest: by_tokens(rank[0], 60, largest, prompts=rank[1], keys=4), *ranks)
    assert len({len(parts) for parts in found}) == 1
    for (lengths, prompts), parts in zip(ranks, found, strict=True):
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert all(computed(lengths, prompts, part) <= 60 or len(part) == 1 for part in parts)
        groups = {group: [row for row, (one, _) in enumerate(prompts) if one == group] for group, _ in prompts}
        if len(groups) >= len(parts) and all(computed(lengths, prompts, rows) <= 60 for rows in groups.values()):
            assert all(any(set(rows) <= set(part) for part in parts) for rows in groups.values())


def test_a_group_above_the_limit_is_split_and_each_part_has_its_prompt():
    lengths, prompts = [30] * 4, [(7, 20)] * 4

    def split(most: int) -> list[list[int]]:
        return by_tokens(lengths, most, lambda number: number, prompts=prompts, keys=4)

    assert split(60) == [[0, 1, 2, 3]]
    assert sorted(split(59)) == [[0, 1], [2, 3]]
    larger = split(29)
    assert sorted(filter(None, larger)) == [[0], [1], [2], [3]], "a row alone is larger than that"


def test_a_rank_with_one_group_cuts_it_where_another_rank_needs_more_micro_batches():
    one, other = ([12] * 4, [(0, 10)] * 4), ([40, 40, 40], [(0, 1), (1, 1), (2, 1)])
    found = all_ranks(lambda rank, largest: by_tokens(rank[0], 40, largest, prompts=rank[1], keys=4), one, other)
    assert [len(parts) for parts in found] == [3, 3]
    assert all(found[0]), "no rank is without rows as long as it has as many"


def test_gathered_keys_bound_a_micro_batch_as_well():
    # 16 rows of 100 tokens, of which 99 are shared: 115 tokens are computed, for 1600 keys.
    lengths, prompts = [100] * 16, [(0, 99)] * 16

    def rows(most: int, keys: int) -> list[int]:
        return [len(part) for part in by_tokens(lengths, most, lambda number: number, prompts=prompts, keys=keys)]

    assert rows(400, 4) == [16]
    assert rows(399, 4) == [8, 8]
    assert rows(400, 1) == [4, 4, 4, 4], "no more than of rows that share nothing"
