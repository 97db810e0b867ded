"""Chooses three calls of a plan anew, exactly, while the other calls stay; repeats this until no three calls can be
improved.

Invariant (tests/unit/plan/test_search.py): the plan never gets slower, and if time does not run out no choice of up to
`FREED_CALLS` calls improves it.
"""

import time
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from verl_fuse.plan import branch
from verl_fuse.plan.bound import Relaxation
from verl_fuse.plan.branch import Candidates
from verl_fuse.plan.space import MoveSeconds, PlanSpace

FREED_CALLS = 3
# Plans this close are as good.
PLAN_TOLERANCE = 1e-6
NODES = 20_000


def improve(
    space: PlanSpace,
    move: MoveSeconds,
    relaxation: Relaxation,
    candidates: Candidates,
    plan: NDArray[np.int64],
    seconds: float,
    until: float,
) -> tuple[NDArray[np.int64], float]:
    """Return the improved plan and its exact seconds, no later than the time `until` of the monotonic clock; `plan`
    must fit."""
    calls = range(plan.size)
    neighbourhoods = list(combinations(calls, min(FREED_CALLS, plan.size)))
    at = since = 0
    while since < len(neighbourhoods) and time.monotonic() < until:
        free = np.isin(calls, neighbourhoods[at])
        state = branch.start(relaxation, plan, seconds)
        state.order = np.concatenate([state.order[~free[state.order]], state.order[free[state.order]]])
        restricted = _restricted(candidates, plan, free)
        while not state.finished and time.monotonic() < until:
            if branch.advance(space.tables, relaxation, restricted, state, PLAN_TOLERANCE, NODES):
                space.fill(move, state.choice)
        since = 0 if state.seconds < seconds else since + 1
        plan, seconds = state.best, state.seconds
        at = (at + 1) % len(neighbourhoods)
    return plan, seconds


def _restricted(candidates: Candidates, plan: NDArray[np.int64], free: NDArray[np.bool_]) -> Candidates:
    """Return candidates in which every call but the free calls has only the option of the plan."""
    options, bounds = candidates.options.copy(), candidates.bounds.copy()
    options[~free, 0], bounds[~free, 0] = plan[~free], 0.0
    return Candidates(options, bounds, np.where(free, candidates.counts, 1))
