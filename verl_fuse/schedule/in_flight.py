"""Runs CP-SAT on the whole problem, with memory kept by limits on the micro-batches in flight.

A capacity per rank says little until nearly every op is placed. A limit of k micro-batches of one pipeline in flight on
a stage is a chain of precedences (the forward of micro-batch m + k follows the backward of m) that narrows the start of
every op at once. The limits that leave a fast schedule are not known beforehand, so the room on a rank is shared
between the models anew for every try.

Invariants (tests/unit/schedule/test_in_flight.py): limits fit the capacity together, unless one micro-batch each does
not; a solution keeps the limits and the makespan asked for; no goal is refuted.
"""

import math
from collections.abc import Mapping

import numpy as np

from verl_fuse.schedule.bounds import Limits, makespan_bound
from verl_fuse.schedule.constraint_model import FOUND, SolverSearch, build
from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.serial import serial
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE, Budget
from verl_fuse.schedule.table import OpTable

FIRST_EFFORT_SHARE = 4.0
"""Effort against that of the annealing where there is no capacity: what the annealing is bad at."""

EFFORT_SHARES = (0.25, 4.0)
"""The same while memory is sought: from 1, doubled by a success and halved by a failure, between these."""

UNEVEN = 1.5
"""The share of a model is up to this many powers of two from even."""

CAPACITIES_TRIED = (1.8, 2.4)
"""Capacity of every other try where the goal sets none, as a multiple of what serial 1F1B holds;
the first has no limits."""

QUICK = 800
"""Up to this many ops a try is so short that another one follows a success."""

LIMITS_DRAWN = 20
"""Limits drawn before a run gives up finding some that the bound does not rule out."""


class InFlightSearch(SolverSearch):
    """An attempt that asks for the goal's makespan under limits that change from try to try; `worker` keeps random
    streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        super().__init__(table)
        self.worker = worker
        self.models = sorted({p.model for p in table.problem.pipelines})
        self.serial_peak = serial(table, Budget(0)).peak
        self.shares = dict.fromkeys(self.models, 1.0)
        self.unlimited, self.share = False, 1.0
        self.spent = 0.0

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        random = np.random.default_rng([seed, self.worker, 2])
        fast = goal.incumbent.makespan <= goal.makespan * (1 + MAKESPAN_TOLERANCE)
        spent, most = 0.0, math.inf
        for _ in range(LIMITS_DRAWN):
            if goal.over or spent >= most:
                return
            found = limits(self.table, self._capacity(goal, fast, random), self.shares)
            if makespan_bound(self.table, found) > goal.makespan * (1 + MAKESPAN_TOLERANCE):
                self._turn(random)
                continue
            share = self.share if math.isfinite(goal.capacity) else FIRST_EFFORT_SHARE
            solved = self._solve(goal, found, min(share * effort, most - spent), int(random.integers(2**30)))
            if fast and (solved or not goal.over):
                self.share = min(self.share * 2, EFFORT_SHARES[1]) if solved else max(self.share / 2, EFFORT_SHARES[0])
            if not (fast and solved and len(self.table) <= QUICK):
                return
            # A solution that holds less, if still too much, is worth another try within the effort.
            spent, most = spent + self.spent, effort

    def _turn(self, random: np.random.Generator) -> None:
        self.shares = {model: float(2 ** random.uniform(-UNEVEN, UNEVEN)) for model in self.models}

    def _capacity(self, goal: Goal, fast: bool, random: np.random.Generator) -> float:
        """Return the goal's capacity, or a random one between the goal's and the incumbent's peak where only memory is
        wrong with the incumbent."""
        if math.isinf(goal.capacity):
            self.unlimited = not self.unlimited
            return math.inf if self.unlimited else self.serial_peak * float(random.uniform(*CAPACITIES_TRIED))
        highest = max(goal.capacity, goal.incumbent.peak) if fast else goal.capacity
        return float(random.uniform(goal.capacity, highest))

    def _solve(self, goal: Goal, limits: Limits, effort: float, seed: int) -> bool:
        """Tell whether the goal's makespan was reached under these limits."""
        model = build(self.table, self.scales, self.scales.time.ticks(goal.makespan), limits)
        solver, status = self.solve(model.cp, goal, effort, seed)
        if status not in FOUND:
            self._turn(np.random.default_rng(seed))
            return False
        self.spent = solver.response_proto.deterministic_time
        solution = model.solution(solver)
        if solution is not None:
            goal.offer(solution)
        return solution is not None


def limits(table: OpTable, capacity: float, shares: Mapping[str, float]) -> dict[tuple[int, int], int]:
    """Return the limit that 1F1B needs on every stage, then more in proportion to the model's share while the rank has
    room.

    Where 1F1B itself does not fit, every pipeline of the rank is cut in proportion, down to one.
    """
    pipelines = table.problem.pipelines
    found: dict[tuple[int, int], int] = {}
    for rank in range(table.problem.ranks):
        here = [(i, p.ranks.index(rank)) for i, p in enumerate(pipelines) if rank in p.ranks]
        needed = {(i, s): min(pipelines[i].microbatches, pipelines[i].stages - s) for i, s in here}
        kept = dict(needed)
        room = capacity * (1 + MAKESPAN_TOLERANCE) - sum(n * pipelines[i].activation[s] for (i, s), n in kept.items())
        while room < 0 and any(n > 1 for n in kept.values()):
            i, s = max((stage for stage in here if kept[stage] > 1), key=lambda stage: kept[stage] / needed[stage])
            kept[i, s] -= 1
            room += pipelines[i].activation[s]
        growing = list(here)
        while growing:
            i, s = min(growing, key=lambda stage: (kept[stage] + 1 - needed[stage]) / shares[pipelines[stage[0]].model])
            if kept[i, s] == pipelines[i].microbatches or pipelines[i].activation[s] > room:
                growing.remove((i, s))
                continue
            kept[i, s] += 1
            room -= pipelines[i].activation[s]
        found |= kept
    return found
