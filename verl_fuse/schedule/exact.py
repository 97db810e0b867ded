"""Reaches a goal by CP-SAT, or proves that no schedule can.

Invariants (tests/unit/schedule/test_exact.py): the result agrees with brute force on tiny problems; a proof of a
rounded problem is never called a proof.
"""

import math

import numpy as np
from ortools.sat.python import cp_model

from verl_fuse.errors import FuseError
from verl_fuse.schedule.constraint_model import build, solver_for
from verl_fuse.schedule.descent import Attempt, Goal, descend
from verl_fuse.schedule.solution import Bounds, Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales
from verl_fuse.schedule.timing import orders_of

EXACT_MAX_OPS = 6000
"""Above this the model is too large to pay off."""


def exact(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """Run the constraint solver alone."""
    return descend(table, budget, [ExactSearch(table)])


class ExactSearch(Attempt):
    """An attempt to reach or refute a goal with one CP-SAT thread, which the seed makes reproducible."""

    def __init__(self, table: OpTable) -> None:
        self.table, self.scales = table, scales(table)
        self.solver: cp_model.CpSolver | None = None

    def interrupt(self) -> None:
        if self.solver is not None:
            self.solver.stop_search()

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        """Ask whether the goal can be reached (odd seeds), or minimise the makespan from the incumbent (even seeds)."""
        if len(self.table) > EXACT_MAX_OPS:
            return
        clock, memory = self.scales.time, self.scales.memory
        wanted, known = clock.ticks(goal.makespan), clock.ticks(goal.incumbent.makespan)
        minimise = seed % 2 == 0 and known > wanted
        model = build(self.table, self.scales, known if minimise else wanted)
        if math.isfinite(goal.capacity):
            model.limit_memory(
                {rank: memory.floor(goal.capacity) for rank, ids in enumerate(self.table.on_rank) if len(ids)}
            )
        if minimise:
            model.minimize_end(wanted)
            model.hint(goal.incumbent.starts)
        solver = self.solver = solver_for(seed, effort / 2, goal.deadline)
        if goal.over:
            return
        status = solver.solve(model.cp)
        self.solver = None
        if status == cp_model.MODEL_INVALID:
            raise FuseError(f"CP-SAT refuses the model: {model.cp.validate()}")
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            starts = np.array([solver.value(variable) for variable in model.starts], dtype=np.float64)
            solution = from_orders(self.table, orders_of(self.table, starts))
            if solution is not None:
                goal.offer(solution)
        if not self.scales.exact:
            return
        if status == cp_model.INFEASIBLE:
            goal.refute(clock.value((known if minimise else wanted) + 1))
        elif minimise and status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            goal.refute(clock.value(math.ceil(solver.best_objective_bound - 1e-6)))
