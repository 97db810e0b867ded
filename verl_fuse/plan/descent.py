"""Computes the cost of a plan for a search, and its cost with another option for one call."""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.evaluate import EVALUATED_STEPS, fits, peak_bytes, schedule, unfilled
from verl_fuse.plan.space import MoveSeconds, PlanSpace
from verl_fuse.plan.tables import PlanTables

# A plan over its memory limit costs at least this many seconds, so that a search first makes it fit.
OVERFULL = 1e9


@njit(cache=True)
def cost(t: PlanTables, choice: NDArray[np.int64]) -> float:
    """Return the seconds per step; OVERFULL * (1 + the needed share of the limit) for a plan that does not fit;
    infinite if a move is not filled in."""
    if unfilled(t, choice) >= 0:
        return np.inf
    return optimistic_cost(t, choice)


@njit(cache=True)
def optimistic_cost(t: PlanTables, choice: NDArray[np.int64]) -> float:
    """Return the cost if moves that are not filled in were free."""
    if fits(t, choice):
        return schedule(t, choice, EVALUATED_STEPS, np.empty(2 * choice.size), np.empty(2 * choice.size))
    peak = 0.0
    for c in range(choice.size):
        peak = max(peak, peak_bytes(t, choice, t.first[choice[c]]))
    return OVERFULL * (1.0 + peak / t.limit)


@njit(cache=True)
def optimistic_costs(t: PlanTables, choice: NDArray[np.int64], call: int) -> NDArray[np.float64]:
    """Return the optimistic cost of the plan with each option of `call`."""
    found = np.empty(t.begin[call + 1] - t.begin[call])
    trial = choice.copy()
    for i in range(found.size):
        trial[call] = t.begin[call] + i
        found[i] = optimistic_cost(t, trial)
    return found


def exact_cost(space: PlanSpace, move: MoveSeconds, plan: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the cost of one plan, without room for the moves of other plans."""
    alone = space.keep(np.isin(np.arange(space.config.size), plan)).with_room_for_moves()
    choice = np.arange(len(plan))
    alone.fill(move, choice)
    return float(cost(alone.tables, choice))


def bytes_needed(t: PlanTables, found: float) -> float:
    """Return the bytes per device of a plan that costs `found` because it does not fit."""
    return (found / OVERFULL - 1.0) * t.limit
