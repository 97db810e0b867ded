"""Searches large neighbourhoods: CP-SAT re-orders everything inside a time window, the rest keeps its order.

Every critical path crosses every window, so a window that can be packed tighter shortens the whole schedule. Ops before
a window give its ops release times, ops after it give them tails; the model holds the window's ops alone, whatever the
size of the problem.

Invariants (tests/unit/schedule/test_windows.py): a result keeps the capacity and is never longer
than the solution it was made from.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from verl_fuse.schedule.constraint_model import FOUND, SolverSearch
from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.solution import Solution, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import activation_ticks, time_ticks
from verl_fuse.schedule.timing import earliest, tails_in_order

WINDOW_EFFORT_SHARE = 0.7
"""Effort against that of the annealing."""

WINDOW_SECONDS = 0.6
"""Deterministic time for one window."""


@dataclass
class _Window:
    """The model of one window: start variables by op, first and last position by rank, and `ends`, the length of the
    schedule along each way out."""

    model: cp_model.CpModel
    orders: tuple[tuple[int, ...], ...]
    start: list[int]
    variables: dict[int, cp_model.IntVar] = field(default_factory=dict)
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: list[cp_model.LinearExprT] = field(default_factory=list)


class WindowSearch(SolverSearch):
    """An attempt to shorten the goal's closest solution window by window; `worker` keeps random streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        super().__init__(table)
        self.worker = worker
        self.delay, self.duration = time_ticks(table, self.scales)
        self.activation = [activation_ticks(table, self.scales, op) for op in range(len(table))]
        self.before = table.before.tolist()
        self.ops_per_window = 150.0

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        random = np.random.default_rng([seed, self.worker, 1])
        spent = 0.0
        while goal.closest is not None and spent < WINDOW_EFFORT_SHARE * effort and not goal.over:
            begun = time.thread_time()
            self._shorten(goal, goal.closest, random)
            spent += time.thread_time() - begun

    def _shorten(self, goal: Goal, current: Solution, random: np.random.Generator) -> None:
        """Pack one window tighter within the capacity."""
        start = earliest(current.orders, self.before, self.delay, self.duration)
        assert start is not None, "the orders of a solution do not deadlock"
        end = max(begin + duration for begin, duration in zip(start, self.duration, strict=True))
        span = min(1.0, self.ops_per_window / len(start)) * end
        opening = float(random.uniform(-span / 2, end - span / 2))
        window = self._window(current, start, opening, span, end)
        if not window.variables:
            return
        makespan = window.model.new_int_var(min(self.scales.time.ticks(goal.makespan), end), end, "")
        for expression in window.ends:
            window.model.add(expression <= makespan)
        if math.isfinite(goal.capacity):
            for rank in window.ranks:
                self._limit(window, rank, self.scales.memory.floor(goal.capacity), end)
        window.model.minimize(makespan)
        solution = self._solve(window, int(random.integers(2**30)), goal)
        if solution is not None and solution.makespan <= current.makespan:
            goal.offer(solution)

    def _window(self, current: Solution, start: list[int], opening: float, span: float, horizon: int) -> _Window:
        """Return the model of the ops that start in [opening, opening + span); all other ops keep their order."""
        orders = current.orders
        inside = {op for op, begin in enumerate(start) if opening <= begin < opening + span}
        tail = tails_in_order(orders, self.before, self.delay, self.duration, start)
        model = cp_model.CpModel()
        window = _Window(model, orders, start)
        for rank, order in enumerate(orders):
            mine = [op for op in order if op in inside]
            if not mine:
                continue
            first, last = order.index(mine[0]), order.index(mine[-1])
            window.ranks[rank] = (first, last)
            free = start[order[first - 1]] + self.duration[order[first - 1]] if first else 0
            after = tail[order[last + 1]] if last + 1 < len(order) else 0
            for op in mine:
                source = self.before[op]
                outside = (
                    start[source] + self.duration[source] + self.delay[op]
                    if source >= 0 and source not in inside
                    else 0
                )
                variable = window.variables[op] = model.new_int_var(max(free, outside), horizon - self.duration[op], "")
                model.add_hint(variable, start[op])
                window.ends.append(variable + self.duration[op] + after)
            model.add_no_overlap(
                [model.new_fixed_size_interval_var(window.variables[op], self.duration[op], "") for op in mine]
            )
        for op, variable in window.variables.items():
            source = self.before[op]
            if source in window.variables:
                model.add(variable >= window.variables[source] + self.duration[source] + self.delay[op])
            if self.table.microbatch[op] and op - 1 in window.variables:
                model.add(variable >= window.variables[op - 1] + self.duration[op - 1])
        for op, source in enumerate(self.before):
            if source in window.variables and op not in inside:
                window.ends.append(window.variables[source] + self.duration[source] + self.delay[op] + tail[op])
        return window

    def _solve(self, window: _Window, seed: int, goal: Goal) -> Solution | None:
        """Return the renewed schedule, or None when the solver found no solution in its time; also adapt the size of
        windows to the time that solving takes."""
        solver, status = self.solve(window.model, goal, WINDOW_SECONDS, seed)
        self.ops_per_window = (
            min(600.0, self.ops_per_window * 1.1)
            if status == cp_model.OPTIMAL
            else max(60.0, self.ops_per_window * 0.93)
        )
        if status not in FOUND:
            return None
        values = {op: solver.value(variable) for op, variable in window.variables.items()}
        renewed = [
            sorted(order, key=lambda op: (values.get(op, window.start[op]), window.start[op]))
            for order in window.orders
        ]
        return from_orders(self.table, renewed)

    def _limit(self, window: _Window, rank: int, capacity: int, horizon: int) -> None:
        """Bound the memory of one rank inside the window; micro-batches in flight when the window opens or closes are
        held from its beginning or to its end."""
        order, (_first, last) = window.orders[rank], window.ranks[rank]
        model, variables = window.model, window.variables
        later = set(order[last + 1 :])
        intervals, sizes = [], []
        for op in order[: last + 1]:
            size = self.activation[op]
            if self.table.kind[op] == 1 or size == 0:
                continue
            backward = op + self.table.problem.pipelines[self.table.pipeline[op]].microbatches
            if op not in variables and backward not in variables and backward not in later:
                continue
            opens = variables.get(op, 0)
            closes = variables[backward] + self.duration[backward] if backward in variables else horizon
            intervals.append(model.new_interval_var(opens, model.new_int_var(0, horizon, ""), closes, ""))
            sizes.append(size)
        if intervals:
            model.add_cumulative(intervals, sizes, capacity)
