"""Sorts by small whole numbers: a counting sort, where numpy would compare.

Invariant (tests/unit/reshard/test_parts.py): the result equals numpy's stable argsort.
"""

import numpy as np
from numba import njit

from verl_fuse.spec.arrays import Ints

# The counts themselves cost more than comparing above this many numbers per key.
BINS_PER_KEY = 8


def order_of(keys: Ints, bins: int) -> Ints:
    """Return indices that sort `keys`, whole numbers from 0 to below `bins`, and leave equal keys in order."""
    return np.argsort(keys, kind="stable") if bins > BINS_PER_KEY * len(keys) else _counted(keys, bins)


@njit(cache=True)
def _counted(keys, bins):
    places = np.zeros(bins + 1, np.int64)
    for key in keys:
        places[key + 1] += 1
    for key in range(bins):
        places[key + 1] += places[key]
    order = np.empty(len(keys), np.int64)
    for index in range(len(keys)):
        order[places[keys[index]]] = index
        places[keys[index]] += 1
    return order
