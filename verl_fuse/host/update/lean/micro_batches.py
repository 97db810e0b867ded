"""Splits the computed rows into micro-batches, as many on every data-parallel rank.

Invariants (tests/unit/host/test_lean_micro_batches.py, tests/integration/test_lean_engines.py):
- every computed row is in exactly one micro-batch, and no other row is in any;
- no micro-batch is larger than the run's configuration allows, in rows or, with dynamic batch sizes, in tokens;
- all ranks have the same number, at least one: a rank that runs out of rows gets empty ones, whose collectives a row
  without weight carries.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

# The largest of a number over all ranks, agreed on by all of them.
Largest = Callable[[int], int]


def by_rows(count: int, most: int, largest: Largest, multiple: int = 1) -> list[list[int]]:
    """Split `count` rows, at most `most` in each micro-batch; the number of micro-batches is a multiple of
    `multiple`."""
    number = _rounded(largest(-(-count // most)), multiple)
    ends = [count * place // number for place in range(number + 1)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def by_tokens(lengths: Sequence[int], most: int, largest: Largest, multiple: int = 1) -> list[list[int]]:
    """Split rows of these lengths, at most `most` tokens in each micro-batch, into micro-batches of about the same
    work."""
    number = _rounded(largest(-(-sum(lengths) // most)), multiple)
    while True:
        parts = _balanced(lengths, number)
        # Whole rows do not fill micro-batches evenly: more of them may be needed, on any rank.
        fits = all(sum(lengths[row] for row in part) <= most or len(part) == 1 for part in parts)
        if not largest(int(not fits)):
            return parts
        number += multiple


def _balanced(lengths: Sequence[int], number: int) -> list[list[int]]:
    filled = min(number, len(lengths))
    parts: list[list[int]] = []
    if filled:
        import torch

        work = calculate_workload(torch.tensor(lengths, dtype=torch.int64)).tolist()
        found: Any = get_seqlen_balanced_partitions(work, filled, equal_size=False)
        parts = [sorted(part) for part in found]
    return parts + [[] for _ in range(number - filled)]


def _rounded(number: int, multiple: int) -> int:
    return -(-max(number, 1) // multiple) * multiple
