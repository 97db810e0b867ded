"""Serial 1F1B: the models train one after the other, like without fusion; a model starts when the model before it has
ended on every rank."""

import numpy as np

from verl_fuse.schedule.one_f_one_b import rank_orders, waves
from verl_fuse.schedule.solution import Budget, Solution, from_starts
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.timing import orders_of


def serial(table: OpTable, budget: Budget) -> Solution:
    """Run all copies of a model side by side, one model after the other."""
    starts, now = np.zeros(len(table)), 0.0
    for wave in waves(table):
        times = _alone(table, wave)
        starts[list(times)] = np.array(list(times.values())) + now
        now = max(start + float(table.duration[op]) for op, start in times.items()) + now
    return from_starts(table, orders_of(table, starts), starts)


def _alone(table: OpTable, wave: list[int]) -> dict[int, float]:
    """Return the earliest starts of the pipelines of one wave when nothing else runs; their 1F1B orders cannot
    deadlock."""
    orders = rank_orders(table, wave)
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    left = sum(map(len, orders))
    while left:
        for r, order in enumerate(orders):
            while position[r] < len(order):
                op = order[position[r]]
                source = int(table.before[op])
                if source >= 0 and source not in ends:
                    break
                starts[op] = max(free[r], ends[source] + float(table.delay[op]) if source >= 0 else 0.0)
                free[r] = ends[op] = starts[op] + float(table.duration[op])
                position[r] += 1
                left -= 1
    return starts
