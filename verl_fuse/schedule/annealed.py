"""Simulated annealing on running orders, from a greedy start, under a hard memory limit.

Invariants (tests/unit/schedule/test_annealed.py): never worse than greedy; one worker and one seed give one result unless the clock stops it.

After the idea of RLHFuse (arXiv 2409.13221), with two changes that replace its hundreds of processors: only neighbours on a critical path are swapped,
and memory is a limit that is lowered step by step instead of a second energy.
"""

import numpy as np

from verl_fuse.schedule.descent import Attempt, Goal, descend
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.model import Scales, activation_ticks, scales
from verl_fuse.schedule.solution import Bounds, Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable, Orders

MOVES_PER_SECOND = 3e8
"""Ops timed per second of effort: what one core manages, so that an effort of 1 is about a second."""

CHUNK = 1e8
"""Ops timed between looks at the clock."""


def annealed(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """Annealing alone, on every worker."""
    return descend(table, budget, [Anneal(table, worker) for worker in range(budget.workers)])


class Anneal(Attempt):
    """Tries to reach a goal by annealing from the greedy starts in turn; `worker` keeps random streams apart."""

    def __init__(self, table: OpTable, worker: int) -> None:
        self.table, self.worker = table, worker
        self.scales: Scales = scales(table)
        self.starts: tuple[float, list[Solution]] | None = None

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        from verl_fuse.schedule import kernel  # numba takes a second to import

        starts = self._starts(goal.capacity)
        if not starts:
            return
        begin = starts[(seed + self.worker) % len(starts)]
        goal.offer(begin)
        table, ticks = self.table, self.scales.time.ticks
        count = len(table)
        duration = np.array([max(1, ticks(d)) for d in table.duration.tolist()], dtype=np.int64)
        delay = np.array([ticks(d) for d in table.delay.tolist()], dtype=np.int64)
        change = np.array([activation_ticks(table, self.scales, op) for op in range(count)], dtype=np.int64)
        change[table.kind == 1] *= -1
        sink = np.full(count, -1, dtype=np.int64)
        consumed = np.flatnonzero(table.before >= 0)
        sink[table.before[consumed]] = consumed
        lane = (table.pipeline * count + table.stage) * 2 + table.kind
        ahead, behind, held = _links(begin.orders, change)
        last = np.array([order[-1] if order else -1 for order in begin.orders], dtype=np.int64)
        best_ahead = ahead.copy()
        capacity = (
            self.scales.memory.floor(goal.capacity) if np.isfinite(goal.capacity) else int(np.abs(change).sum()) + 1
        )
        target = ticks(goal.makespan)
        best = np.iinfo(np.int64).max
        steps = max(1, int(effort * MOVES_PER_SECOND / count))
        chunks = max(1, round(steps * count / CHUNK))
        random = np.random.default_rng([seed, self.worker])
        hot = float(random.choice([0.2, 0.4, 0.8])) * float(np.median(duration))
        cold = hot / 8
        for chunk in range(chunks):
            if goal.over:
                return
            temperatures = hot * (cold / hot) ** (chunk / chunks), hot * (cold / hot) ** ((chunk + 1) / chunks)
            found = kernel.anneal(
                int(random.integers(2**31)), max(1, steps // chunks), *temperatures, target, capacity, ahead, behind, last, table.rank, held,
                table.before, sink, delay, duration, lane, change, best, best_ahead,
            )  # fmt: skip
            if found < best:
                best = found
                solution = from_orders(table, _orders(table, best_ahead))
                if solution is not None:
                    goal.offer(solution)

    def _starts(self, capacity: float) -> list[Solution]:
        if self.starts is None or self.starts[0] != capacity:
            self.starts = (capacity, candidates(self.table, capacity)[:4])
        return self.starts[1]


def _links(orders: Orders, change: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Neighbours on the rank, and memory held after each op."""
    ahead, behind = np.full(len(change), -1, dtype=np.int64), np.full(len(change), -1, dtype=np.int64)
    held = np.zeros(len(change), dtype=np.int64)
    for order in orders:
        ids = np.asarray(order, dtype=np.int64)
        ahead[ids[1:]], behind[ids[:-1]] = ids[:-1], ids[1:]
        held[ids] = np.cumsum(change[ids])
    return ahead, behind, held


def _orders(table: OpTable, ahead: np.ndarray) -> list[list[int]]:
    follower = {int(left): op for op, left in enumerate(ahead.tolist()) if left >= 0}
    orders = []
    for ids in table.on_rank:
        order = [op for op in ids.tolist() if ahead[op] < 0]
        while order and order[-1] in follower:
            order.append(follower[order[-1]])
        orders.append(order)
    return orders
