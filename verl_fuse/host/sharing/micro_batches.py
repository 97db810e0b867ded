"""Splits rows into micro-batches, as many on every data-parallel rank; rows of a prompt that is computed once stay
together.

Invariants (tests/unit/host/test_sharing_micro_batches.py, tests/integration/test_lean_engines.py,
tests/integration/test_shared_prompts.py):
- every row is in exactly one micro-batch;
- no micro-batch is larger than the run's configuration allows, in rows or, with dynamic batch sizes, in tokens that are
  computed, except for a single row; the lengths of its rows, prompts counted for each, sum to `keys` times that at
  most;
- all ranks have the same number, at least one: a rank that has fewer rows than that gets empty ones.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_fuse.host.sharing.plan import Prompts

# The largest of a number over all ranks, agreed on by all of them.
Largest = Callable[[int], int]


def by_rows(count: int, most: int, largest: Largest, multiple: int = 1) -> list[list[int]]:
    """Split `count` rows, at most `most` in each micro-batch; the number of micro-batches is a multiple of
    `multiple`."""
    number = _rounded(largest(-(-count // most)), multiple)
    ends = [count * place // number for place in range(number + 1)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def by_tokens(
    lengths: Sequence[int],
    most: int,
    largest: Largest,
    multiple: int = 1,
    prompts: Prompts | None = None,
    keys: int = 1,
) -> list[list[int]]:
    """Split rows of these lengths, at most `most` tokens in each micro-batch, into micro-batches of about the same
    work. With `prompts`, the tokens that rows share are computed once in each micro-batch, whose whole rows have at
    most `keys` times `most` tokens: attention gathers a prompt's keys for each of its rows."""
    sizes = _Sizes(lengths, prompts or [(row, 0) for row in range(len(lengths))], most, keys)
    units = [part for unit in sizes.groups() for part in _fitting(unit, sizes.fit)]
    least = max(-(-sum(map(sizes.tokens, units)) // most), -(-sum(lengths) // (keys * most)))
    number = _rounded(largest(least), multiple)
    while True:
        units = _at_least(number, units, sizes.work)
        parts = _balanced(units, number, sizes.work)
        # Whole units do not fill micro-batches evenly: more of them may be needed, on any rank.
        fits = all(map(sizes.fit, parts))
        if not largest(int(not fits)):
            return parts
        number += multiple


class _Sizes:
    """How much rows are together, and whether that is too much for a micro-batch."""

    def __init__(self, lengths: Sequence[int], prompts: Prompts, most: int, keys: int) -> None:
        self._lengths, self._prompts, self._most, self._keys = lengths, prompts, most, keys
        shared = [tokens for _, tokens in prompts]
        self._work, self._saved = (calculate_workload(torch.tensor(each)).tolist() for each in (lengths, shared))

    def groups(self) -> list[list[int]]:
        """Return the rows of each prompt."""
        found: dict[int, list[int]] = {}
        for row, (number, _) in enumerate(self._prompts):
            found.setdefault(number, []).append(row)
        return list(found.values())

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens that are computed for these rows."""
        return sum(self._lengths[row] for row in rows) - sum(self._prompts[row][1] for row in self._copies(rows))

    def fit(self, rows: Sequence[int]) -> bool:
        """Tell whether a micro-batch holds these rows; it always holds one."""
        whole = sum(self._lengths[row] for row in rows)
        return len(rows) == 1 or (self.tokens(rows) <= self._most and whole <= self._keys * self._most)

    def work(self, rows: Sequence[int]) -> int:
        """Return their work, as verl counts it."""
        return sum(self._work[row] for row in rows) - sum(self._saved[row] for row in self._copies(rows))

    def _copies(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose prompt another one of these rows computes."""
        seen: set[int] = set()
        copies = []
        for row in rows:
            number, _ = self._prompts[row]
            if number in seen:
                copies.append(row)
            seen.add(number)
        return copies


def _fitting(unit: list[int], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    if fits(unit):
        return [unit]
    half = len(unit) // 2
    return _fitting(unit[:half], fits) + _fitting(unit[half:], fits)


def _at_least(number: int, units: list[list[int]], work: Callable[[list[int]], int]) -> list[list[int]]:
    """Return so many units, if there are as many rows: the largest ones are cut in two."""
    found = list(units)
    while len(found) < number and (several := [unit for unit in found if len(unit) > 1]):
        largest = max(several, key=work)
        found.remove(largest)
        found += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return found


def _balanced(units: list[list[int]], number: int, work: Callable[[list[int]], int]) -> list[list[int]]:
    filled = min(number, len(units))
    parts: list[list[int]] = []
    if filled:
        found: Any = get_seqlen_balanced_partitions([work(unit) for unit in units], filled, equal_size=False)
        parts = [sorted(row for one in part for row in units[one]) for part in found]
    return parts + [[] for _ in range(number - filled)]


def largest_of(group: Any) -> Largest:
    """Return how the ranks of a process group agree on the largest of a number."""

    def largest(number: int) -> int:
        found = torch.tensor([number], device=get_device_name())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return int(found.item())

    return largest


def _rounded(number: int, multiple: int) -> int:
    return -(-max(number, 1) // multiple) * multiple
