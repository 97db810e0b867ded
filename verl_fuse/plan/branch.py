"""Searches by depth-first branch and bound over the options of one call after another, heaviest call first.

Fixed calls take memory; near the root the least seconds of the free calls are therefore taken over the options that
still fit.

Invariants (tests/unit/plan/test_search.py):
- a finished search has proved its bound: no plan of the space beats `incumbent * (1 - tolerance)`;
- an interrupted one reports the least bound of the part that it has not looked at.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.bound import Relaxation, lower_bound, raise_floor, tightened_bound
from verl_fuse.plan.descent import optimistic_cost
from verl_fuse.plan.evaluate import fits, unfilled
from verl_fuse.plan.tables import PlanTables

# Calls fixed until which the free ones are looked at again; deeper down that costs more than it saves.
LOOK_AHEAD = 3


class Candidates(NamedTuple):
    """The options that could still be part of a better plan, per call, best bound first."""

    options: NDArray[np.int64]  # n x most
    bounds: NDArray[np.float64]  # n x most, of the plan in which only this option is fixed
    counts: NDArray[np.int64]  # n


@dataclass
class BranchState:
    """The state of a search, so that the search can go on after a look at the clock."""

    order: NDArray[np.int64]
    pointer: NDArray[np.int64]
    choice: NDArray[np.int64]
    lowest: NDArray[np.float64]
    area: NDArray[np.float64]
    floor: NDArray[np.float64]
    best: NDArray[np.int64]
    seconds: float
    level: int = 0
    nodes: int = 0

    @property
    def finished(self) -> bool:
        return self.level < 0


@njit(cache=True)
def bounds_alone(t: PlanTables, r: Relaxation) -> NDArray[np.float64]:
    """Return per option the bound of the plan in which only this option is fixed; infinite if the option alone does not
    fit."""
    found = np.empty(t.seconds.size)
    choice = np.full(t.begin.size - 1, -1, np.int64)
    for c in range(choice.size):
        for o in range(t.begin[c], t.begin[c + 1]):
            choice[c] = o
            found[o] = np.inf if t.resident[o] + t.active[o] > t.limit else lower_bound(t, r, choice)
        choice[c] = -1
    return found


def candidates(t: PlanTables, alone: NDArray[np.float64], below: float, most: int | None = None) -> Candidates:
    """Return the options whose bound is below `below`, at most `most` per call."""
    n = t.begin.size - 1
    most = most or int(np.max(np.diff(t.begin)))
    options = np.zeros((n, most), np.int64)
    bounds = np.full((n, most), np.inf)
    counts = np.zeros(n, np.int64)
    for c in range(n):
        span = np.arange(t.begin[c], t.begin[c + 1])
        kept = span[alone[span] < below]
        kept = kept[np.argsort(alone[kept], kind="stable")][:most]
        options[c, : kept.size], bounds[c, : kept.size], counts[c] = kept, alone[kept], kept.size
    return Candidates(options, bounds, counts)


def every_option(t: PlanTables) -> Candidates:
    """Return all options, whatever their bound."""
    return candidates(t, np.zeros(t.seconds.size), np.inf)


def start(r: Relaxation, best: NDArray[np.int64], seconds: float) -> BranchState:
    """Return a search that has not begun, with a known plan."""
    n = best.size
    order = np.argsort(-r.lowest, kind="stable").astype(np.int64)
    lowest, area, floor = (np.tile(row, (n, 1)) for row in (r.lowest, r.lowest_area, r.floor))
    return BranchState(
        order, np.zeros(n, np.int64), np.full(n, -1, np.int64), lowest, area, floor, best.copy(), seconds
    )


def advance(t: PlanTables, r: Relaxation, k: Candidates, s: BranchState, tolerance: float, nodes: int) -> bool:
    """Look at up to `nodes` further nodes, in place; True if it stopped because `s.choice` needs a move that is not
    filled in."""
    level, seconds, used, stopped = _advance(
        t, r, k, s.order, s.pointer, s.choice, s.lowest, s.area, s.floor, s.best, s.level, s.seconds, tolerance, nodes
    )
    s.level, s.seconds, s.nodes = int(level), float(seconds), s.nodes + int(used)
    return bool(stopped)


def open_bound(k: Candidates, state: BranchState) -> float:
    """Return the least bound of the open part of the search (infinite after the end): the bound of the current choice
    of the first call."""
    if state.finished:
        return np.inf
    first = state.order[0]
    at = max(state.pointer[0] - 1, 0)
    return float(k.bounds[first, at]) if at < k.counts[first] else np.inf


@njit(cache=True)
def _advance(t, r, k, order, pointer, choice, lowest, area, floor, best, level, seconds, tolerance, nodes):
    n = choice.size
    used = 0
    while level >= 0 and used < nodes:
        c = order[level]
        descend = False
        while pointer[level] < k.counts[c]:
            i = pointer[level]
            below = seconds * (1.0 - tolerance)
            if k.bounds[c, i] >= below:
                pointer[level] = k.counts[c]
                break
            pointer[level] += 1
            used += 1
            choice[c] = k.options[c, i]
            if not fits(t, choice) or _bound(t, r, choice, level, lowest, area, floor) >= below:
                continue
            if level == n - 1:
                if unfilled(t, choice) >= 0:
                    pointer[level] -= 1
                    return level, seconds, used, True
                found = optimistic_cost(t, choice)
                if found < seconds:
                    seconds = found
                    best[:] = choice
                continue
            lowest[level + 1] = lowest[level]
            area[level + 1] = area[level]
            floor[level + 1] = floor[level]
            if level < LOOK_AHEAD:
                _look_ahead(t, r, k, choice, lowest[level + 1], area[level + 1], floor[level + 1])
                if _bound(t, r, choice, level + 1, lowest, area, floor) >= below:
                    continue
            descend = True
            break
        if descend:
            level += 1
            pointer[level] = 0
        else:
            choice[c] = -1
            level -= 1
    return level, seconds, used, False


@njit(cache=True, inline="always")
def _bound(t, r, choice, level, lowest, area, floor):
    return tightened_bound(t, r, choice, lowest[level], area[level], floor[level])


@njit(cache=True)
def _look_ahead(t, r, k, choice, lowest, area, floor):
    """Tighten the least seconds of free calls and blocks to the candidates that fit beside the fixed options."""
    within = np.full((choice.size, t.devices + 1), np.inf)
    for c in range(choice.size):
        if choice[c] >= 0:
            within[c, 0] = np.nan
            continue
        area[c] = np.inf
        for i in range(k.counts[c]):
            o = k.options[c, i]
            size = t.end[o] - t.first[o]
            if t.seconds[o] >= within[c, size] and t.seconds[o] * size >= area[c]:
                continue
            choice[c] = o
            if fits(t, choice):
                within[c, size] = min(within[c, size], t.seconds[o])
                area[c] = min(area[c], t.seconds[o] * size)
        choice[c] = -1
        for size in range(1, t.devices + 1):
            within[c, size] = min(within[c, size], within[c, size - 1])
        lowest[c] = within[c, t.devices]
    raise_floor(within, r.block, r.ordered, floor)
