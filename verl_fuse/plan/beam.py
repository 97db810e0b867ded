"""Builds plans call by call, heaviest first, and keeps the partial plans with the least bound: the start of a
search."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.bound import Relaxation, lower_bound
from verl_fuse.plan.branch import Candidates
from verl_fuse.plan.evaluate import fits
from verl_fuse.plan.tables import PlanTables


def build(t: PlanTables, r: Relaxation, k: Candidates, order: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return up to `width` complete plans that fit, least bound first; shape (plans, calls), possibly no plan."""
    beam = np.full((1, order.size), -1, np.int64)
    for c in order:
        options = k.options[c, : k.counts[c]]
        bounds = _extend(t, r, beam, c, options).ravel()
        best = np.argsort(bounds, kind="stable")[:width]
        best = best[np.isfinite(bounds[best])]
        beam = beam[best // options.size].copy() if options.size else beam[:0]
        beam[:, c] = options[best % max(options.size, 1)]
    return beam


@njit(cache=True)
def _extend(
    t: PlanTables, r: Relaxation, beam: NDArray[np.int64], call: int, options: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the bounds of every partial plan with every option of `call`; infinite where the option does not fit."""
    found = np.full((beam.shape[0], options.size), np.inf)
    for i in range(beam.shape[0]):
        choice = beam[i].copy()
        for j in range(options.size):
            choice[call] = options[j]
            if fits(t, choice):
                found[i, j] = lower_bound(t, r, choice)
    return found
