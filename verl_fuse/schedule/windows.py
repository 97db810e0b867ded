"""Large-neighbourhood search: CP-SAT re-orders everything inside a time window, the rest keeps its order.

Every critical path crosses every window, so a window that can be packed tighter shortens the whole schedule. What lies before a window gives its ops
release times, what lies after gives them tails; the model holds the window's ops alone, whatever the size of the problem.

Invariants (tests/unit/schedule/test_windows.py): a result keeps the capacity and is never longer than what it was made from.
"""

import itertools
import math
import time

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from verl_fuse.schedule.descent import Attempt, Goal
from verl_fuse.schedule.model import activation_ticks, scales
from verl_fuse.schedule.solution import Solution, from_orders
from verl_fuse.schedule.table import OpTable

SECONDS = 0.6
"""Deterministic time for one window."""


class Windows(Attempt):
    """Improves the goal's closest solution window by window."""

    def __init__(self, table: OpTable, worker: int) -> None:
        self.table, self.worker, self.scales = table, worker, scales(table)
        ticks = self.scales.time.ticks
        self.duration = [max(1, ticks(d)) for d in table.duration.tolist()]
        self.delay = [ticks(d) for d in table.delay.tolist()]
        self.activation = [activation_ticks(table, self.scales, op) for op in range(len(table))]
        self.before = table.before.tolist()
        self.ops_per_window = 150.0
        self.solver: cp_model.CpSolver | None = None

    def interrupt(self) -> None:
        if self.solver is not None:
            self.solver.stop_search()

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        random = np.random.default_rng([seed, self.worker, 1])
        spent = 0.0
        while spent < effort and not goal.over:
            if goal.closest is None:
                return
            begun = time.thread_time()
            self._improve(goal, goal.closest, random)
            spent += time.thread_time() - begun

    def _improve(self, goal: Goal, current: Solution, random: np.random.Generator) -> None:
        orders, start = current.orders, self._ticks(current)
        end = max(start[op] + self.duration[op] for op in range(len(start)))
        span = min(1.0, self.ops_per_window / len(start)) * end
        opening = float(random.uniform(-span / 2, end - span / 2))
        inside = {op for op, begin in enumerate(start) if opening <= begin < opening + span}
        if not inside:
            return
        tail = self._tails(orders, start, opening + span)
        model = cp_model.CpModel()
        goal_ticks = self.scales.time.ticks(goal.makespan)
        makespan = model.new_int_var(min(goal_ticks, end), end, "")
        variables: dict[int, cp_model.IntVar] = {}
        for _rank, order in enumerate(orders):
            mine = [op for op in order if op in inside]
            if not mine:
                continue
            first, last = order.index(mine[0]), order.index(mine[-1])
            free = start[order[first - 1]] + self.duration[order[first - 1]] if first else 0
            after = tail[order[last + 1]] if last + 1 < len(order) else 0
            for op in mine:
                source = self.before[op]
                outside = (
                    start[source] + self.duration[source] + self.delay[op]
                    if source >= 0 and source not in inside
                    else 0
                )
                variables[op] = model.new_int_var(max(free, outside), end - self.duration[op], "")
                model.add_hint(variables[op], start[op])
                model.add(variables[op] + self.duration[op] + after <= makespan)
            model.add_no_overlap(
                [model.new_fixed_size_interval_var(variables[op], self.duration[op], "") for op in mine]
            )
            if math.isfinite(goal.capacity):
                self._limit(model, variables, order, first, last, self.scales.memory.floor(goal.capacity), end)
        for op, variable in variables.items():
            source = self.before[op]
            if source in variables:
                model.add(variable >= variables[source] + self.duration[source] + self.delay[op])
            if self.table.microbatch[op] and op - 1 in variables:
                model.add(variable >= variables[op - 1] + self.duration[op - 1])
        for op, source in enumerate(self.before):
            if source in variables and op not in inside:
                model.add(variables[source] + self.duration[source] + self.delay[op] + tail[op] <= makespan)
        model.minimize(makespan)
        status, values = self._solve(model, variables, int(random.integers(2**30)), goal)
        self.ops_per_window = (
            min(600.0, self.ops_per_window * 1.1)
            if status == cp_model.OPTIMAL
            else max(60.0, self.ops_per_window * 0.93)
        )
        if values is None:
            return
        renewed = [
            sorted(order, key=lambda op: (values.get(op, start[op]), start[op])) if order else order for order in orders
        ]
        solution = from_orders(self.table, renewed)
        if solution is not None and solution.makespan <= current.makespan:
            goal.offer(solution)

    def _solve(
        self, model: cp_model.CpModel, variables: dict[int, cp_model.IntVar], seed: int, goal: Goal
    ) -> tuple[int, dict[int, int] | None]:
        solver = self.solver = cp_model.CpSolver()
        settings = solver.parameters
        settings.num_workers, settings.random_seed = 1, seed
        settings.max_deterministic_time = SECONDS
        settings.max_time_in_seconds = max(0.01, goal.deadline - time.monotonic())
        settings.catch_sigint_signal = False
        settings.linearization_level, settings.cp_model_probing_level, settings.symmetry_level = 0, 0, 0
        status = solver.solve(model)
        self.solver = None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return status, None
        return status, {op: solver.value(variable) for op, variable in variables.items()}

    def _limit(
        self,
        model: cp_model.CpModel,
        variables: dict[int, cp_model.IntVar],
        order,
        first: int,
        last: int,
        capacity: int,
        horizon: int,
    ) -> None:
        """Capacity of one rank inside the window; what is in flight when it opens or closes is held from its beginning or to its end."""
        intervals, sizes = [], []
        mine = set(order[first : last + 1])
        for op in [*order[: last + 1]]:
            size = self.activation[op]
            if self.table.kind[op] == 1 or size == 0:
                continue
            backward = op + self.table.problem.pipelines[self.table.pipeline[op]].microbatches
            if op not in mine and backward not in mine:
                if self._held_across(order, backward, last):
                    intervals.append(model.new_fixed_size_interval_var(0, horizon, ""))
                    sizes.append(size)
                continue
            opens = variables[op] if op in mine else 0
            closes = variables[backward] + self.duration[backward] if backward in mine else horizon
            intervals.append(model.new_interval_var(opens, model.new_int_var(0, horizon, ""), closes, ""))
            sizes.append(size)
        if intervals:
            model.add_cumulative(intervals, sizes, capacity)

    @staticmethod
    def _held_across(order, backward: int, last: int) -> bool:
        return backward in order[last + 1 :]

    def _ticks(self, solution: Solution) -> list[int]:
        """Earliest start of every op in ticks, for the solution's orders."""
        if self.scales.time.exact:
            return [self.scales.time.ticks(s) for s in solution.starts.tolist()]
        return _earliest(solution.orders, self.before, self.delay, self.duration)

    def _tails(self, orders, start: list[int], closing: float) -> NDArray[np.int64]:
        """Longest path from the start of each op after the window to the end."""
        tail = np.zeros(len(start), dtype=np.int64)
        behind = {left: right for order in orders for left, right in itertools.pairwise(order)}
        sink = {source: op for op, source in enumerate(self.before) if source >= 0}
        for op in sorted(
            (op for op, begin in enumerate(start) if begin >= closing), key=lambda op: (-start[op], -self.duration[op])
        ):
            after = tail[behind[op]] if op in behind else 0
            consumer = sink.get(op)
            if consumer is not None:
                after = max(after, self.delay[consumer] + tail[consumer])
            tail[op] = self.duration[op] + after
        return tail


def _earliest(orders, before: list[int], delay: list[int], duration: list[int]) -> list[int]:
    """Earliest starts in ticks of orders that are known not to deadlock."""
    start = [-1] * len(before)
    position, free = [0] * len(orders), [0] * len(orders)
    left = len(before)
    while left:
        for r, order in enumerate(orders):
            while position[r] < len(order):
                op = order[position[r]]
                source = before[op]
                if source >= 0 and start[source] < 0:
                    break
                start[op] = max(free[r], start[source] + duration[source] + delay[op] if source >= 0 else 0)
                free[r] = start[op] + duration[op]
                position[r] += 1
                left -= 1
    return start
