"""Anneals running orders, from a greedy start, under a hard memory limit.

Invariants (tests/unit/schedule/test_makespan_annealing.py): the result is never worse than greedy; one worker and one
seed give one result unless the clock stops it.

After the idea of RLHFuse (arXiv 2409.13221), with two changes that replace its hundreds of processors: only neighbours
on a critical path are swapped, and memory is a limit that is lowered step by step instead of a second energy.
"""

import numpy as np

from verl_fuse.schedule.descent import Attempt, Goal, descend
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.priorities import PrioritySearch
from verl_fuse.schedule.solution import Bounds, Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import Scales, scales
from verl_fuse.schedule.timing import orders_of

OPS_TIMED_PER_SECOND = 5e8
"""Ops timed per second of effort: what one core manages, so that an effort of 1 is about a second."""

LEAST_OPS_PER_SWAP = 1500
"""Ops that a swap costs at least, however few it times."""

DISPATCHES_PER_SECOND = 9e6
"""Ops placed per second of effort by greedy list scheduling."""

CLIMB_SHARE = 0.25
"""Part of the effort that goes into the start."""

CLIMBS = 3

MAKESPAN_TEMPERATURES = (0.8, 0.3)
"""First temperatures, in mean op durations: the first forgets the start, the second polishes it.
Workers and seeds take turns."""

MAKESPAN_COOLING = 8.0
"""First over last temperature."""

OPS_PER_LOOK = 1e8
"""Ops timed between looks at the clock."""


def annealed(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """Run annealing alone, on every worker."""
    return descend(table, budget, [MakespanAnnealing(table, worker) for worker in range(budget.workers)])


class MakespanAnnealing(Attempt):
    """An attempt to reach a goal by annealing from the greedy starts in turn; `worker` keeps random streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        self.table, self.worker = table, worker
        self.scales: Scales = scales(table)
        self.search: PrioritySearch | None = None

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        from verl_fuse.schedule import makespan_kernel, swap_kernel  # numba takes a second to import

        random = np.random.default_rng([seed, self.worker])
        if self.search is None or self.search.capacity != goal.capacity:
            self.search = PrioritySearch(self.table, self.scales, goal.capacity)
        begin = self._start(self.search, goal, random, effort * CLIMB_SHARE)
        if begin is None:
            return
        goal.offer(begin)
        table, target = self.table, self.scales.time.ticks(goal.makespan)
        graph = swap_kernel.graph_of(table, self.scales)
        order = swap_kernel.order_of(graph, begin.orders)
        best_previous, best = order.previous.copy(), int(np.iinfo(np.int64).max)
        capacity = (
            self.scales.memory.floor(goal.capacity)
            if np.isfinite(goal.capacity)
            else int(np.abs(graph.change).sum()) + 1
        )
        steps = max(1, int(effort * (1 - CLIMB_SHARE) * OPS_TIMED_PER_SECOND / max(len(table), LEAST_OPS_PER_SWAP)))
        chunks = max(1, round(steps * max(len(table), LEAST_OPS_PER_SWAP) / OPS_PER_LOOK))
        hot = MAKESPAN_TEMPERATURES[(seed + self.worker) % len(MAKESPAN_TEMPERATURES)] * float(np.mean(graph.duration))
        cold = hot / MAKESPAN_COOLING
        for chunk in range(chunks):
            if goal.over:
                return
            temperatures = hot * (cold / hot) ** (chunk / chunks), hot * (cold / hot) ** ((chunk + 1) / chunks)
            found = makespan_kernel.anneal_makespan(
                graph, order, int(random.integers(2**31)), max(1, steps // chunks), *temperatures, target, capacity,
                best, best_previous
            )  # fmt: skip
            if found < best:
                best = found
                solution = from_orders(table, swap_kernel.orders_from(table, best_previous))
                if solution is not None:
                    goal.offer(solution)

    def _start(self, search: PrioritySearch, goal: Goal, random: np.random.Generator, effort: float) -> Solution | None:
        """Return the best of a few climbs through greedy priorities, or back-to-back 1F1B where the climbs strand; None
        when even 1F1B holds too much."""
        found: list[Solution] = []
        trials = max(20, int(effort * DISPATCHES_PER_SECOND / len(self.table)))
        for _ in range(CLIMBS):
            starts = search.climb(random, max(5, trials // CLIMBS), lambda: goal.over)
            solution = from_orders(self.table, orders_of(self.table, starts)) if starts is not None else None
            if solution is not None:
                found.append(solution)
        if not found:
            found = candidates(self.table, goal.capacity)
        return min(found, key=lambda s: s.key, default=None)
