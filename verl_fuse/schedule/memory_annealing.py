"""Anneals the memory of a schedule that is fast enough, see `slimming`.

Invariants (tests/unit/schedule/test_memory_annealing.py): a result is never slower than the goal; one worker and one
seed give one result unless the clock stops it.
"""

import numpy as np

from verl_fuse.schedule.descent import Attempt, Goal
from verl_fuse.schedule.makespan_annealing import LEAST_OPS_PER_SWAP
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE, from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales

SWAPPED_OPS_PER_SECOND = 8e8
"""Swaps times ops per second of effort: what one core manages."""

MEMORY_EFFORT_SHARE = 0.5
"""Effort against that of the annealing of the makespan."""

MEMORY_TEMPERATURES = (300.0, 3000.0)
"""First temperatures, in squared mean activations."""

MEMORY_COOLING = 300.0
"""First over last temperature."""

EFFORT_PER_LOOK = 0.25
"""Effort between looks at the clock."""


class MemoryAnnealing(Attempt):
    """An attempt to bring the memory of the goal's incumbent towards the goal's capacity at the goal's makespan;
    `worker` keeps random streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        self.table, self.worker, self.scales = table, worker, scales(table)

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        from verl_fuse.schedule import memory_kernel, swap_kernel  # numba takes a second to import

        begin = goal.incumbent
        if begin.makespan > goal.makespan * (1 + MAKESPAN_TOLERANCE) or not np.isfinite(goal.capacity):
            return
        random = np.random.default_rng([seed, self.worker, 3])
        graph = swap_kernel.graph_of(self.table, self.scales)
        order = swap_kernel.order_of(graph, begin.orders)
        best_previous = order.previous.copy()
        deadline, capacity = self.scales.time.ticks(goal.makespan), self.scales.memory.floor(goal.capacity)
        unit = float(np.abs(graph.change).mean()) ** 2
        hot = float(random.choice(MEMORY_TEMPERATURES)) * unit
        cooling = 1 / MEMORY_COOLING
        energy = best = memory_kernel.energy_of(order, capacity)
        chunks = max(1, round(MEMORY_EFFORT_SHARE * effort / EFFORT_PER_LOOK))
        swaps = max(1, int(EFFORT_PER_LOOK * SWAPPED_OPS_PER_SECOND / max(len(self.table), LEAST_OPS_PER_SWAP)))
        peak = begin.peak
        for chunk in range(chunks):
            if goal.over:
                return
            temperatures = hot * cooling ** (chunk / chunks), hot * cooling ** ((chunk + 1) / chunks)
            energy, found = memory_kernel.anneal_memory(
                graph, order, int(random.integers(2**31)), swaps, *temperatures, deadline, capacity, energy,
                best, best_previous
            )  # fmt: skip
            if found < best:
                best = found
                solution = from_orders(self.table, swap_kernel.orders_from(self.table, best_previous))
                if solution is not None and solution.peak < peak:
                    peak = solution.peak
                    goal.offer(solution)
