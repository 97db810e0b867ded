"""Spreads the computed rows over the data-parallel ranks, within each mini-batch.

Invariants (tests/unit/host/test_lean_balance.py):
- every mini-batch has the rows that verl gives it, and every rank as many of them as before;
- work of rows that are computed is spread as evenly as verl spreads that of all;
- a mini-batch that the ranks do not divide is left as it is: verl refuses it.
"""

from collections.abc import Sequence
from typing import Any

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def balanced(work: Sequence[int], ranks: int, mini_batch: int) -> list[int]:
    """Return the order of rows, whose `work` is 0 where nothing is computed: each rank gets an even share of the batch,
    and of every mini-batch of `mini_batch` rows the next of its share."""
    order = list(range(len(work)))
    if mini_batch % ranks:
        # The assertion in verl's `train_mini_batch` names both numbers.
        return order
    share, part = len(work) // ranks, mini_batch // ranks
    for start in range(0, share, part):
        places = [rank * share + start + row for rank in range(ranks) for row in range(part)]
        shares: Any = get_seqlen_balanced_partitions([work[place] for place in places], ranks, equal_size=True)
        for place, row in zip(places, (row for share in shares for row in share), strict=True):
            order[place] = places[row]
    return order
