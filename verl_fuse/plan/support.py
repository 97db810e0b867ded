"""Drops options that go with no other option: of each other call some option must fit beside it and keep the bound of
the two below a plan's time.

Invariant (tests/unit/plan/test_search.py): an option of a plan that takes less than `below` is never dropped.
"""

import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.bound import Relaxation, lower_bound
from verl_fuse.plan.branch import Candidates, fits_so_far
from verl_fuse.plan.tables import PlanTables

# A second round drops options that only dropped options supported; a third round drops hardly any.
SUPPORT_ROUNDS = 2
# Candidates between two looks at the clock.
ROWS = 64


def supported(t: PlanTables, r: Relaxation, k: Candidates, below: float, until: float = np.inf) -> Candidates:
    """Return the candidates that have such a partner in every other call, in their order; after the time `until` the
    rest stays."""
    for _ in range(SUPPORT_ROUNDS):
        options, bounds, counts = np.zeros_like(k.options), np.full_like(k.bounds, np.inf), np.zeros_like(k.counts)
        for c in range(counts.size):
            kept = np.ones(k.counts[c], np.bool_)
            for begin in range(0, kept.size, ROWS):
                if time.monotonic() < until:
                    _look_for_partners(t, r, k, below, c, begin, kept[begin : begin + ROWS])
            counts[c] = kept.sum()
            options[c, : counts[c]] = k.options[c, : kept.size][kept]
            bounds[c, : counts[c]] = k.bounds[c, : kept.size][kept]
        k = Candidates(options, bounds, counts)
    return k


@njit(cache=True)
def _look_for_partners(
    t: PlanTables, r: Relaxation, k: Candidates, below: float, call: int, begin: int, kept: NDArray[np.bool_]
) -> None:
    """Mark in `kept` which candidates of `call` to keep, from `begin` on."""
    choice = np.full(k.counts.size, -1, np.int64)
    for i in range(kept.size):
        choice[call] = k.options[call, begin + i]
        for b in range(k.counts.size):
            if b == call or not kept[i]:
                continue
            kept[i] = False
            for j in range(k.counts[b]):
                choice[b] = k.options[b, j]
                if fits_so_far(t, choice) and lower_bound(t, r, choice) < below:
                    kept[i] = True
                    break
            choice[b] = -1
