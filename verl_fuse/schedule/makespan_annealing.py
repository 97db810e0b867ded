"""Anneals running orders, from the best known or a greedy start, under a hard memory limit.

Invariants (tests/unit/schedule/test_makespan_annealing.py): the result is never worse than greedy; one worker and one
seed give one result unless the clock stops it.

After the idea of RLHFuse (arXiv 2409.13221), with two changes that replace its hundreds of processors: only neighbours
on a critical path are swapped, and memory is a limit that is lowered step by step instead of a second energy.
"""

import numpy as np

from verl_fuse.schedule.descent import Attempt, Goal, descend
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.solution import Bounds, Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales

OPS_TIMED_PER_SECOND = 5e8
"""Ops timed per second of effort: what one core manages, so that an effort of 1 is about a second."""

LEAST_OPS_PER_SWAP = 1500
"""Ops that a swap costs at least, however few it times."""

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
    """An attempt to reach a goal by annealing from what came closest to it; `worker` keeps random streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        self.table, self.worker, self.scales = table, worker, scales(table)

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        from verl_fuse.schedule import makespan_kernel, swap_kernel  # numba takes a second to import

        random = np.random.default_rng([seed, self.worker])
        if goal.closest is None:
            for solution in candidates(self.table, goal.capacity)[:1]:
                goal.offer(solution)
        begin = goal.closest
        if begin is None:  # even 1F1B holds too much
            return
        table, target = self.table, self.scales.time.ticks(goal.makespan)
        graph = swap_kernel.graph_of(table, self.scales)
        order = swap_kernel.order_of(graph, begin.orders)
        best_previous, best = order.previous.copy(), int(np.iinfo(np.int64).max)
        capacity = (
            self.scales.memory.floor(goal.capacity)
            if np.isfinite(goal.capacity)
            else int(np.abs(graph.change).sum()) + 1
        )
        steps = max(1, int(effort * OPS_TIMED_PER_SECOND / max(len(table), LEAST_OPS_PER_SWAP)))
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
