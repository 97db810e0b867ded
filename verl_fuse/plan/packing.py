"""Computes the least time in which three unordered calls can be done, each on a number of devices of its choice.

Two calls that together need more devices than there are run one after the other. If any two of three can run at once
but not all three, then still two of them run one after the other: intervals that overlap pairwise have a point in
common.

Invariant (tests/unit/plan/test_packing.py): no placement of three calls on a row of devices is faster.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.tables import Scalar


@njit(cache=True)
def three_calls(a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float64]) -> float:
    """Return the least seconds of three calls. Each array holds the least seconds on at most so many devices, index 0
    to all devices, infinite where nothing fits; not increasing."""
    devices = a.size - 1
    sizes_a, sizes_b, sizes_c = _steps(a), _steps(b), _steps(c)
    best = np.inf
    for i in sizes_a:
        for j in sizes_b:
            two = max(a[i], b[j])
            if i + j > devices:
                two = a[i] + b[j]
            if two >= best:
                continue
            for k in sizes_c:
                if max(two, c[k]) < best:
                    best = min(
                        best,
                        _seconds(
                            a[i], b[j], c[k], i + j > devices, i + k > devices, j + k > devices, i + j + k > devices
                        ),
                    )
    return best


@njit(cache=True)
def _steps(least: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of devices at which one more device first helps."""
    return np.flatnonzero(least[1:] < least[:-1]) + 1


@njit(cache=True, inline="always")
def _seconds(a: Scalar, b: Scalar, c: Scalar, ab: bool, ac: bool, bc: bool, abc: bool) -> Scalar:
    """Return the least time for fixed durations; ab, ac, bc: these two cannot run at once; abc: all three cannot."""
    if ab and ac and bc:
        return a + b + c
    longest = max(a, max(b, c))
    if ab and ac:
        return max(longest, a + max(b, c))
    if ab and bc:
        return max(longest, b + max(a, c))
    if ac and bc:
        return max(longest, c + max(a, b))
    if ab:
        return max(longest, a + b)
    if ac:
        return max(longest, a + c)
    if bc:
        return max(longest, b + c)
    if abc:
        return max(longest, min(a + b, min(a + c, b + c)))
    return longest
