"""Computes the cost of a running order: start times, makespan, activation memory.

Invariants (tests/unit/schedule/test_order_timing.py):
- `earliest_starts` gives every op the smallest start its order, its input and the transfer allow, or None
  when the orders deadlock;
- memory rises at the start of F and falls at the end of B, so it depends on the orders alone.
"""

import numpy as np
from numpy.typing import NDArray

from verl_fuse.schedule.table import OpTable, Orders


def earliest_starts(table: OpTable, orders: Orders) -> NDArray[np.float64] | None:
    """Return the start time of every op when each rank runs its order as early as it can; None when ranks
    wait for each other forever."""
    before = table.before.tolist()
    delay, duration = table.delay.tolist(), table.duration.tolist()
    starts = [-1.0] * len(table)
    free = [0.0] * table.problem.ranks
    position = [0] * table.problem.ranks
    waiting: dict[int, int] = {}
    runnable = list(range(table.problem.ranks))
    done = 0
    while runnable:
        r = runnable.pop()
        order = orders[r]
        while position[r] < len(order):
            op = order[position[r]]
            source = before[op]
            start = free[r]
            if source >= 0:
                if starts[source] < 0:
                    waiting[source] = r
                    break
                start = max(start, starts[source] + duration[source] + delay[op])
            starts[op] = start
            free[r] = start + duration[op]
            position[r] += 1
            done += 1
            if op in waiting:
                runnable.append(waiting.pop(op))
    return np.array(starts) if done == len(table) else None


def earliest_ticks(orders: Orders, before: list[int], delay: list[int], duration: list[int]) -> list[int]:
    """Return the earliest starts in ticks of orders that cannot deadlock."""
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


def orders_of(table: OpTable, starts: NDArray[np.float64] | NDArray[np.int64]) -> list[list[int]]:
    """Return the op ids of each rank sorted by start time (op id breaks ties)."""
    return [ids[np.argsort(starts[ids], kind="stable")].tolist() for ids in table.on_rank]


def rank_peaks(table: OpTable, orders: Orders) -> NDArray[np.float64]:
    """Return the peak activation memory of each rank."""
    peaks = np.zeros(table.problem.ranks)
    for r, order in enumerate(orders):
        ids = np.asarray(order, dtype=np.int64)
        if len(ids):
            change = np.where(table.kind[ids] == 0, table.activation[ids], -table.activation[ids])
            peaks[r] = rounded(float(np.cumsum(change).max()))
    return peaks


def rounded(value: float) -> float:
    """Return `value` to 12 significant digits: sums of floats that should be equal are."""
    return float(f"{value:.12g}")


def makespan(table: OpTable, starts: NDArray[np.float64]) -> float:
    return rounded(float((starts + table.duration).max()))
