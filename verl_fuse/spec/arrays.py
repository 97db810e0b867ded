"""Names types of numpy arrays, and fits lines to them."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Token ids of any width: engines and files have 32 bits.
Tokens = NDArray[np.integer]


def nonnegative_fit(table: Floats, target: Floats) -> Floats:
    """Return the coefficients >= 0 with which few columns of a table (rows x columns) come closest to a target: least
    squares over the best subset of the columns, which is the constrained optimum."""
    best, least = np.zeros(table.shape[1]), float(np.square(target).sum())
    for count in range(1, table.shape[1] + 1):
        for chosen in map(list, combinations(range(table.shape[1]), count)):
            found = np.linalg.lstsq(table[:, chosen], target, rcond=None)[0]
            error = float(np.square(table[:, chosen] @ found - target).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(table.shape[1]), error
                best[chosen] = found
    return best
