"""How a lean update spreads over ranks: the invariants in the docstring of the module."""

import random
from itertools import chain

import pytest

pytest.importorskip("verl")
from verl_fuse.host.update.lean.balance import balanced


def parts(rows, ranks, mini_batch):
    """[mini-batch][rank] -> rows, as verl cuts a batch: a contiguous share for each rank, of which each
    mini-batch takes the next rows."""
    share, part = len(rows) // ranks, mini_batch // ranks
    return [
        [rows[rank * share + start : rank * share + start + part] for rank in range(ranks)]
        for start in range(0, share, part)
    ]


def test_work_moves_to_the_rank_that_has_none():
    order = balanced([5, 7, 6, 8, 0, 0, 0, 0], ranks=2, mini_batch=8)
    work = [5, 7, 6, 8, 0, 0, 0, 0]
    assert [sum(work[row] for row in rank) for rank in parts(order, 2, 8)[0]] == [13, 13]


@pytest.mark.parametrize("seed", range(20))
def test_mini_batches_keep_their_rows_and_work_is_even(seed):
    draw = random.Random(seed)
    ranks, mini_batches, each = draw.choice([2, 4]), draw.choice([1, 2, 3]), draw.choice([2, 8])
    size = ranks * each
    work = [draw.choice([0, 0, draw.randint(50, 100)]) for _ in range(size * mini_batches)]
    order = balanced(work, ranks, size)
    before, after = parts(list(range(len(work))), ranks, size), parts(order, ranks, size)
    for one, other in zip(before, after, strict=True):
        assert sorted(chain(*one)) == sorted(chain(*other))
        loads = [sum(work[row] for row in rank) for rank in other]
        assert max(loads) - min(loads) <= 100, "by no more than a row"


@pytest.mark.parametrize(("ranks", "mini_batch", "rows"), [(4, 10, 20), (4, 2, 4), (4, 6, 12), (3, 4, 12)])
def test_a_mini_batch_that_ranks_do_not_divide_is_left_to_verl_s_assertion(ranks, mini_batch, rows):
    """`rows` is what verl fills the batch up to: the least common multiple."""
    assert balanced(list(range(1, rows + 1)), ranks, mini_batch) == list(range(rows))
