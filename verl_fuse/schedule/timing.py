"""Computes the cost of a running order: start times, makespan, activation memory.

Invariants (tests/unit/schedule/test_order_timing.py):
- `earliest_starts` gives every op the smallest start its order, its input and the transfer allow, or None
  when the orders deadlock;
- memory rises at the start of F and falls at the end of B, so it depends on the orders alone.
"""

from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from verl_fuse.schedule.table import OpTable, Orders

Time = TypeVar("Time", int, float)


def earliest_starts(table: OpTable, orders: Orders) -> NDArray[np.float64] | None:
    """Return the start time of every op when each rank runs its order as early as it can (-1 for an op that no order
    has); None when ranks wait for each other forever."""
    starts = earliest(orders, table.before.tolist(), table.delay.tolist(), table.duration.tolist())
    return None if starts is None else np.array(starts, dtype=np.float64)


def earliest(orders: Orders, before: list[int], delay: list[Time], duration: list[Time]) -> list[Time] | None:
    """Return the same in the unit of `delay` and `duration`, which are by op."""
    starts: list[Any] = [-1] * len(before)
    free: list[Any] = [0] * len(orders)
    position = [0] * len(orders)
    waiting: dict[int, int] = {}
    runnable = list(range(len(orders)))
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
            if op in waiting:
                runnable.append(waiting.pop(op))
    return None if waiting else starts


def tails_in_order(
    orders: Orders, before: list[int], delay: list[int], duration: list[int], starts: list[int]
) -> list[int]:
    """Return the longest path from the start of each op to the end of the schedule, in ticks."""
    behind = {left: right for order in orders for left, right in pairwise(order)}
    sink = {source: op for op, source in enumerate(before) if source >= 0}
    tail = [0] * len(starts)
    for op in sorted(range(len(starts)), key=lambda op: (-starts[op], -duration[op])):
        after = tail[behind[op]] if op in behind else 0
        if op in sink:
            after = max(after, delay[sink[op]] + tail[sink[op]])
        tail[op] = duration[op] + after
    return tail


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
