"""Drops options of calls whose weights never move: options no better in anything than another option on a part of their
devices.

Calls that become ready together start in a fixed order, each when its devices are free. A shorter call on fewer of the
same devices therefore delays nothing, and the best plan needs no dropped option.

Invariant (tests/unit/plan/test_search.py): the best plan of a space takes as long without its dominated options.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.tables import PlanTables


def undominated(t: PlanTables) -> NDArray[np.bool_]:
    """Tell per option whether to keep it."""
    kept = np.ones(t.seconds.size, np.bool_)
    moving = {int(source) for source in t.source if source >= 0}
    for c in range(t.begin.size - 1):
        if t.source[c] < 0 and c not in moving:
            span = np.arange(t.begin[c], t.begin[c + 1])
            # A dominating option comes before the options that it dominates.
            order = span[np.lexsort((t.active[span], t.resident[span], t.end[span] - t.first[span], t.seconds[span]))]
            _drop(t, order, kept)
    return kept


@njit(cache=True)
def _drop(t: PlanTables, order: NDArray[np.int64], kept: NDArray[np.bool_]) -> None:
    for i in range(order.size):
        o = order[i]
        for j in range(i):
            p = order[j]
            inside = t.first[o] <= t.first[p] and t.end[p] <= t.end[o]
            if kept[p] and inside and t.resident[p] <= t.resident[o] and t.active[p] <= t.active[o]:
                kept[o] = False
                break
