"""Builds the constraint model: one no-overlap per rank, one capacity per rank, start times within heads and tails.

Invariants (tests/unit/schedule/test_exact.py): every assignment the model accepts is a schedule that ends by the
deadline and keeps the memory limit; with an exact scale and no limits the model accepts every such schedule, so that
"infeasible" is a proof.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from verl_fuse.schedule.bounds import Limits, heads, tails
from verl_fuse.schedule.descent import Attempt, Goal
from verl_fuse.schedule.solution import Solution, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import Scales, activation_ticks, scales, time_ticks
from verl_fuse.schedule.timing import orders_of

FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)
"""How the solver ends with a solution."""


@dataclass
class ConstraintModel:
    """A CP-SAT model of `table` with the start of every op in ticks."""

    table: OpTable
    scales: Scales
    cp: cp_model.CpModel
    starts: list[cp_model.IntVar]
    durations: list[int]
    deadline: int

    def limit_memory(self, capacity: int) -> None:
        """Bound the activations (ticks) held on each rank."""
        for ids in self.table.on_rank:
            intervals, sizes = [], []
            for op in ids.tolist():
                size = activation_ticks(self.table, self.scales, op)
                if self.table.kind[op] == 1 or size == 0:
                    continue
                backward = op + self.table.problem.pipelines[self.table.pipeline[op]].microbatches
                end = self.starts[backward] + self.durations[backward]
                held = self.cp.new_int_var(0, self.deadline, "")
                intervals.append(self.cp.new_interval_var(self.starts[op], held, end, ""))
                sizes.append(size)
            if intervals:
                self.cp.add_cumulative(intervals, sizes, capacity)

    def minimize_end(self, at_least: int, hint: NDArray[np.float64]) -> None:
        """Minimise the makespan, known to be at least `at_least` ticks, from the start times of `hint` (problem
        units)."""
        end = self.cp.new_int_var(at_least, self.deadline, "makespan")
        for op, start in enumerate(self.starts):
            self.cp.add(end >= start + self.durations[op])
            self.cp.add_hint(start, self.scales.time.ticks(float(hint[op])))
        self.cp.minimize(end)

    def solution(self, solver: cp_model.CpSolver) -> Solution | None:
        """Return the schedule of the orders found; None when they deadlock in the problem's own units."""
        starts = np.array([solver.value(variable) for variable in self.starts], dtype=np.float64)
        return from_orders(self.table, orders_of(self.table, starts))


class SolverSearch(Attempt):
    """An attempt by one CP-SAT thread, which the seed makes reproducible."""

    def __init__(self, table: OpTable) -> None:
        self.table, self.scales = table, scales(table)
        self._solver: cp_model.CpSolver | None = None

    def interrupt(self) -> None:
        if self._solver is not None:
            self._solver.stop_search()

    def solve(
        self, model: cp_model.CpModel, goal: Goal, effort: float, seed: int
    ) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
        """Solve for `effort` deterministic seconds, unless the goal is over."""
        solver = self._solver = solver_for(seed, effort, goal.deadline)
        status = cp_model.UNKNOWN if goal.over else solver.solve(model)
        self._solver = None
        return solver, status


def solver_for(seed: int, effort: float, deadline: float) -> cp_model.CpSolver:
    """Return a solver on one thread, for `effort` (deterministic seconds) and until `deadline` at most."""
    solver = cp_model.CpSolver()
    settings = solver.parameters
    settings.num_workers, settings.random_seed = 1, seed
    settings.max_deterministic_time = effort
    settings.max_time_in_seconds = max(0.01, deadline - time.monotonic())
    settings.catch_sigint_signal = False
    # Measured on the published instances: linear relaxation, probing and symmetry detection cost more than they find.
    settings.linearization_level, settings.cp_model_probing_level, settings.symmetry_level = 0, 0, 0
    return solver


def build(table: OpTable, scales: Scales, deadline: int, limits: Limits | None = None) -> ConstraintModel:
    """Return the model without memory limit or objective; `limits` bounds the micro-batches in flight."""
    cp = cp_model.CpModel()
    ticks = scales.time.ticks
    delays, durations = time_ticks(table, scales)
    release, tail = heads(table, limits).tolist(), tails(table, limits).tolist()
    slack = 0 if scales.time.exact else len(table)  # rounding of every op on the path
    starts: list[cp_model.IntVar] = []
    for op, duration in enumerate(durations):
        earliest = max(0, ticks(release[op]) - slack)
        latest = min(deadline - duration, deadline - ticks(tail[op]) - duration + slack)
        starts.append(cp.new_int_var(earliest, latest, ""))
    for ids in table.on_rank:
        cp.add_no_overlap([cp.new_fixed_size_interval_var(starts[op], durations[op], "") for op in ids.tolist()])
    for op in range(len(table)):
        source = int(table.before[op])
        if source >= 0:
            cp.add(starts[op] >= starts[source] + durations[source] + delays[op])
        if table.microbatch[op]:
            cp.add(starts[op] >= starts[op - 1] + durations[op - 1])
    for (pipeline, stage), limit in (limits or {}).items():
        for microbatch in range(table.problem.pipelines[pipeline].microbatches - limit):
            freeing = table.id(pipeline, stage, 1, microbatch)
            cp.add(starts[table.id(pipeline, stage, 0, microbatch + limit)] >= starts[freeing] + durations[freeing])
    return ConstraintModel(table, scales, cp, starts, durations, deadline)
