"""Reaches a goal by CP-SAT, or proves that no schedule can.

Invariants (tests/unit/schedule/test_exact.py): the result agrees with brute force on tiny problems; a proof of a
rounded problem is never called a proof.
"""

import math

from ortools.sat.python import cp_model

from verl_fuse.errors import FuseError
from verl_fuse.schedule.constraint_model import FOUND, SolverSearch, build
from verl_fuse.schedule.descent import Goal, descend
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable

EXACT_MAX_OPS = 6000
"""Above this the model is too large to pay off."""


def exact(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """Run the constraint solver alone."""
    return descend(table, budget, [ExactSearch(table)])


class ExactSearch(SolverSearch):
    """An attempt to reach or refute a goal."""

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        """Ask whether the goal can be reached (odd seeds), or minimise the makespan from the incumbent (even seeds)."""
        if len(self.table) > EXACT_MAX_OPS:
            return
        clock, memory = self.scales.time, self.scales.memory
        wanted, known = clock.ticks(goal.makespan), clock.ticks(goal.incumbent.makespan)
        minimise = seed % 2 == 0 and known > wanted
        model = build(self.table, self.scales, known if minimise else wanted)
        if math.isfinite(goal.capacity):
            model.limit_memory(memory.floor(goal.capacity))
        if minimise:
            model.minimize_end(wanted, goal.incumbent.starts)
        solver, status = self.solve(model.cp, goal, effort / 2, seed)
        if status == cp_model.MODEL_INVALID:
            raise FuseError(f"CP-SAT refuses the model: {model.cp.validate()}")
        if status in FOUND and (solution := model.solution(solver)) is not None:
            goal.offer(solution)
        if not self.scales.exact:
            return
        if status == cp_model.INFEASIBLE:
            goal.refute(clock.value((known if minimise else wanted) + 1))
        elif minimise and status in FOUND:
            goal.refute(clock.value(math.ceil(solver.best_objective_bound - 1e-6)))
