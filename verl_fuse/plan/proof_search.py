"""Goes from a good plan of a space to the best plan, or to a better plan and a bound.

Branch and bound looks for a plan below a ceiling that rises from the least bound: each round without one proves that
there is none, and the first round with one ends with the best.

There are millions of pairs of placements to move weights between. A move counts as free in bounds until a plan that
needs it could be the best; only then is the cost model asked.

Invariants (tests/unit/plan/test_search.py):
- the plan is never replaced by a slower one, and its time is the exact one;
- no plan of the space takes less than `bound`.
"""

import time
from itertools import product

import numpy as np
from numpy.typing import NDArray

from verl_fuse.plan import branch, descent
from verl_fuse.plan.bound import relax
from verl_fuse.plan.descent import OVERFULL
from verl_fuse.plan.metropolis import metropolis
from verl_fuse.plan.neighbourhood import NODES, PLAN_TOLERANCE, improve
from verl_fuse.plan.space import MoveSeconds, PlanSpace

# The next search looks for plans that take at most this factor more than the proven seconds: a low ceiling leaves few
# options.
BOUND_STEP = 1.01
# Pairs of candidates whose moves are filled in before the proof.
FILLED = 20_000
# Walks, and their first temperatures over the plan's time in turn: they begin with a good plan.
WALKS, WARM = 4, (1e-2, 3e-2)
# A walk may step on options whose bound is up to this much above the best plan.
NEARBY = 1.03


class ProofSearch:
    """A search from a plan that fits to the best plan of a space: the plan, its exact seconds, the bound proven, and
    the nodes of the proof."""

    def __init__(self, space: PlanSpace, move: MoveSeconds, best: NDArray[np.int64], seconds: float):
        self.space, self.move, self.best, self.seconds = space, move, best, seconds
        self.relaxation, self.nodes = relax(space.tables), 0
        self.alone = branch.bounds_alone(space.tables, self.relaxation)
        begin = space.tables.begin
        self.bound = max(float(self.alone[begin[c] : begin[c + 1]].min()) for c in range(best.size))

    @property
    def proven(self) -> bool:
        return self.bound >= self.seconds * (1.0 - PLAN_TOLERANCE)

    def fit(self, until: float) -> None:
        """Find any plan that fits; if there is none, no plan beats the one that does not fit."""
        t = self.space.tables
        state = branch.start(self.relaxation, self.best, OVERFULL)
        candidates = branch.candidates(t, self.alone, OVERFULL)
        while not state.finished and state.seconds >= OVERFULL and time.monotonic() < until:
            if branch.advance(t, self.relaxation, candidates, state, PLAN_TOLERANCE, NODES):
                self.space.fill(self.move, state.choice)
        self.nodes += state.nodes
        if state.seconds < OVERFULL:
            self.best, self.seconds = descend(self.space, self.move, state.best, state.seconds)
        elif state.finished:
            self.bound = self.seconds

    def improve(self, until: float) -> None:
        """Go to a plan that no other choice of a few calls improves."""
        candidates = branch.candidates(self.space.tables, self.alone, self.seconds)
        self.best, self.seconds = improve(
            self.space, self.move, self.relaxation, candidates, self.best, self.seconds, until
        )

    def walk(self, until: float) -> None:
        """Make Metropolis walks from the best plan, and improve each result."""
        begun = time.monotonic()
        for seed in range(WALKS):
            candidates = branch.candidates(self.space.tables, self.alone, self.seconds * NEARBY)
            seconds = begun + (until - begun) * (seed + 0.7) / WALKS - time.monotonic()
            if seconds > 0:
                hot = WARM[seed % len(WARM)]
                best, cost, _ = metropolis(self.space, self.move, candidates, self.best, seconds, hot, seed)
                if cost < self.seconds:
                    self.best, self.seconds = best, cost
                    self.improve(begun + (until - begun) * (seed + 1) / WALKS)

    def prove(self, until: float) -> None:
        """Search by branch and bound below a rising ceiling."""
        while not self.proven and time.monotonic() < until:
            below = min(self.bound * BOUND_STEP, self.seconds)
            candidates = self.candidates(below, until)
            state = branch.start(self.relaxation, self.best, below)
            while not state.finished and time.monotonic() < until:
                if branch.advance(self.space.tables, self.relaxation, candidates, state, PLAN_TOLERANCE, NODES):
                    self.space.fill(self.move, state.choice)
            self.nodes += state.nodes
            if state.seconds < below:
                self.best, self.seconds = descend(self.space, self.move, state.best, state.seconds)
            if state.finished:
                self.bound = min(below, self.seconds) * (1.0 - PLAN_TOLERANCE)
            else:
                self.bound = max(self.bound, min(branch.open_bound(candidates, state), below))

    def candidates(self, below: float, until: float) -> branch.Candidates:
        """Return the options whose bound is below `below`, the moves that bounds depend on filled in, if they are not
        too many."""
        space, relaxation = self.space, self.relaxation
        t = space.tables
        found = branch.candidates(t, self.alone, below)
        for user, train in enumerate(t.source):
            if train < 0 or relaxation.block[user] != 0 or found.counts[user] * found.counts[train] > FILLED:
                continue
            choice = np.array(t.begin[:-1])
            for a, b in product(found.options[train, : found.counts[train]], found.options[user, : found.counts[user]]):
                choice[train], choice[user] = a, b
                if time.monotonic() < until:
                    space.fill_one(self.move, choice, user)
        return found


def descend(
    space: PlanSpace, move: MoveSeconds, plan: NDArray[np.int64], cost: float
) -> tuple[NDArray[np.int64], float]:
    """Try every option of one call after another until none helps; moves are filled in for options that could help."""
    t, plan = space.tables, plan.copy()
    since = call = 0
    while since < plan.size:
        hopes = descent.optimistic_costs(t, plan, call)
        for i in np.argsort(hopes, kind="stable"):
            if hopes[i] >= cost:
                break
            trial = plan.copy()
            trial[call] = t.begin[call] + i
            space.fill(move, trial)
            found = float(descent.cost(t, trial))
            if found < cost:
                plan, cost, since = trial, found, 0
        since, call = since + 1, (call + 1) % plan.size
    return plan, cost
