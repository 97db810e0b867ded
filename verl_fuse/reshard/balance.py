"""Shares work out over the ranks that may do it, so that the largest load is as small as possible.

Invariants (tests/unit/reshard/test_parts.py):
- every task is done in full, by its own candidates;
- the largest load is within 1 % of the optimum of the linear program (exact where candidate sets contain
  each other or are disjoint).
"""

import numpy as np
from numba import njit

from verl_fuse.reshard.streams import Ints

SWEEPS = 40


def balanced_cuts(amounts: Ints, first: Ints, candidates: Ints, ranks: int) -> Ints:
    """Return the cuts of each task: task t, of `amounts[t]` elements, has the candidates `candidates[first[t]:first[t +
    1]]`; each candidate does the elements from its entry of the result up to the entry of the next."""
    order = np.argsort(np.diff(first), kind="stable")
    return _cuts(amounts, first, _water_levels(amounts, first, candidates, ranks, order))


@njit(cache=True)
def _water_levels(amounts, first, candidates, ranks, order):
    """Fill up candidates to a common level, task by task, until no level changes: block coordinate descent on
    the sum of squared loads."""
    load = np.zeros(ranks)
    share = np.zeros(len(candidates))
    for _sweep in range(SWEEPS):
        moved = 0.0
        for task in order:
            low, high = first[task], first[task + 1]
            if high - low == 1:
                moved += abs(share[low] - amounts[task])
                load[candidates[low]] += amounts[task] - share[low]
                share[low] = amounts[task]
                continue
            for at in range(low, high):
                load[candidates[at]] -= share[at]
            levels = np.sort(load[candidates[low:high]])
            below, level = 0.0, 0.0
            for count in range(1, high - low + 1):
                below += levels[count - 1]
                level = (amounts[task] + below) / count
                if count == high - low or level <= levels[count]:
                    break
            for at in range(low, high):
                new = max(0.0, level - load[candidates[at]])
                moved += abs(new - share[at])
                share[at] = new
                load[candidates[at]] += new
        if moved <= 1e-4 * load.max():
            break
    return share


@njit(cache=True)
def _cuts(amounts, first, share):
    """Return the index at which each candidate's whole elements begin."""
    cuts = np.zeros(len(share), np.int64)
    for task in range(len(amounts)):
        total = 0.0
        for at in range(first[task], first[task + 1]):
            cuts[at] = min(amounts[task], np.int64(round(total)))
            total += share[at]
    return cuts
