"""Has the part that both annealings share, compiled by numba: swap two neighbours on a rank, re-time the changed ops,
undo.

Invariants (tests/unit/schedule/test_swaps.py): orders never deadlock, because a swap that would close a cycle is
refused; re-timing the changed ops gives the same starts as timing all ops; an undone swap leaves no trace.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.schedule.table import OpTable, Orders
from verl_fuse.schedule.ticks import Scales, activation_ticks, time_ticks
from verl_fuse.spec.arrays import Ints


class OpGraph(NamedTuple):
    """The data that no order changes, by op: its input and its consumer (-1: none), ticks of time, `change` of memory
    on its `rank`; ops of one `fifo` (pipeline, stage and kind) stay in order."""

    source: Ints
    sink: Ints
    delay: Ints
    duration: Ints
    change: Ints
    rank: Ints
    fifo: Ints


class TimedOrders(NamedTuple):
    """Running orders with their times: each op's neighbours on its rank (-1: none), the last op of each rank, memory
    `held` after each op, start times, a topological order of all ops and the `position` of each op in it. The rest is
    for `undo`: the stretch `old_topological` of that order and its `window` (first position, length), the ops `moved`
    in time and their `old_start`; `dependent` is scratch."""

    previous: Ints
    following: Ints
    last: Ints
    held: Ints
    start: Ints
    topological: Ints
    position: Ints
    old_topological: Ints
    window: Ints
    moved: Ints
    old_start: Ints
    dependent: NDArray[np.bool_]


def graph_of(table: OpTable, scales: Scales) -> OpGraph:
    count, (delay, duration) = len(table), time_ticks(table, scales)
    sink = np.full(count, -1, dtype=np.int64)
    consumed = np.flatnonzero(table.before >= 0)
    sink[table.before[consumed]] = consumed
    change = np.array([activation_ticks(table, scales, op) for op in range(count)], dtype=np.int64)
    return OpGraph(
        source=table.before,
        sink=sink,
        delay=np.array(delay, dtype=np.int64),
        duration=np.array(duration, dtype=np.int64),
        change=np.where(table.kind == 1, -change, change),
        rank=table.rank,
        fifo=(table.pipeline * count + table.stage) * 2 + table.kind,
    )


def order_of(graph: OpGraph, orders: Orders) -> TimedOrders:
    """Return the earliest-start schedule of orders that do not deadlock."""
    count = len(graph.source)
    previous, following = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    held = np.zeros(count, dtype=np.int64)
    for order in orders:
        ids = np.asarray(order, dtype=np.int64)
        previous[ids[1:]], following[ids[:-1]] = ids[:-1], ids[1:]
        held[ids] = np.cumsum(graph.change[ids])
    last = np.array([order[-1] if order else -1 for order in orders], dtype=np.int64)
    start, topological, position, old_topological, moved, old_start = (
        np.zeros(count, dtype=np.int64) for _ in range(6)
    )
    window, dependent = np.zeros(2, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    found = TimedOrders(
        previous,
        following,
        last,
        held,
        start,
        topological,
        position,
        old_topological,
        window,
        moved,
        old_start,
        dependent,
    )
    time_all(graph, found)
    return found


def orders_from(table: OpTable, previous: Ints) -> list[list[int]]:
    """Return running orders from each op's previous neighbour."""
    follower = {int(left): op for op, left in enumerate(previous.tolist()) if left >= 0}
    orders = []
    for ids in table.on_rank:
        order = [op for op in ids.tolist() if previous[op] < 0]
        while order and order[-1] in follower:
            order.append(follower[order[-1]])
        orders.append(order)
    return orders


@njit(cache=True, nogil=True)
def time_all(graph, order):
    """Fill `start`, `topological` and `position`; return the number of ops reached (fewer than all: a cycle)."""
    count = len(graph.source)
    waits = np.zeros(count, np.int64)
    first, last = 0, 0
    for op in range(count):
        waits[op] = (order.previous[op] >= 0) + (graph.source[op] >= 0)
        if waits[op] == 0:
            order.topological[last] = op
            last += 1
    while first < last:
        op = order.topological[first]
        order.position[op] = first
        first += 1
        order.start[op] = _earliest(op, order.previous, order.start, graph.source, graph.delay, graph.duration)
        for other in (order.following[op], graph.sink[op]):
            if other >= 0:
                waits[other] -= 1
                if waits[other] == 0:
                    order.topological[last] = other
                    last += 1
    return last


@njit(cache=True, nogil=True)
def end_of(graph, order):
    end, start, duration = 0, order.start, graph.duration
    for op in order.last:
        if op >= 0:
            end = max(end, start[op] + duration[op])
    return end


@njit(cache=True, nogil=True)
def swap(graph, order, left, right):
    """Run `right`, which follows `left` on its rank, before it; return the number of ops re-timed, or -1 (no swap) when
    the swap closes a cycle."""
    if not _reorder(graph, order, left, right):
        return -1
    _exchange(graph, order, left, right)
    return _retime(graph, order, left, right)


@njit(cache=True, nogil=True)
def undo(graph, order, left, right, retimed):
    """Take back the last swap, which re-timed `retimed` ops."""
    for at in range(retimed):
        order.start[order.moved[at]] = order.old_start[at]
    _exchange(graph, order, right, left)
    first, length = order.window
    for at in range(length):
        op = order.old_topological[at]
        order.topological[first + at] = op
        order.position[op] = first + at


@njit(cache=True, nogil=True)
def _earliest(op, previous, start, source, delay, duration):
    """Return the earliest start of an op. The function takes arrays: handing over a tuple of them for every op would
    cost more than the rest."""
    earliest = 0
    other = previous[op]
    if other >= 0:
        earliest = start[other] + duration[other]
    other = source[op]
    if other >= 0:
        earliest = max(earliest, start[other] + duration[other] + delay[op])
    return earliest


@njit(cache=True, nogil=True)
def _exchange(graph, order, left, right):
    """Exchange two neighbours of a rank, and the memory held after them."""
    previous, following, held = order.previous, order.following, order.held
    outer_left, outer_right = previous[left], following[right]
    held[left], held[right] = held[right], held[left] - graph.change[left] + graph.change[right]
    previous[right], following[right] = outer_left, left
    previous[left], following[left] = right, outer_right
    if outer_left >= 0:
        following[outer_left] = right
    if outer_right >= 0:
        previous[outer_right] = left
    else:
        order.last[graph.rank[left]] = left


@njit(cache=True, nogil=True)
def _reorder(graph, order, left, right):
    """Move `left` and its dependents behind `right` in the topological order; return False (no move) on a cycle."""
    topological, position, dependent, old_topological, previous, sources = (
        order.topological,
        order.position,
        order.dependent,
        order.old_topological,
        order.previous,
        graph.source,
    )
    first, last = position[left], position[right]
    order.window[0], order.window[1] = first, last + 1 - first
    kept = 0
    for at in range(first, last + 1):
        op = topological[at]
        old_topological[at - first] = op
        source, before = sources[op], previous[op]
        dependent[op] = (
            op == left or (source >= 0 and dependent[source]) or (op != right and before >= 0 and dependent[before])
        )
        kept += not dependent[op]
    cyclic = dependent[right]
    free, moved = first, first + kept
    for at in range(last + 1 - first):
        op = old_topological[at]
        if not cyclic:
            if dependent[op]:
                topological[moved], position[op] = op, moved
                moved += 1
            else:
                topological[free], position[op] = op, free
                free += 1
    for at in range(last + 1 - first):
        dependent[old_topological[at]] = False
    return not cyclic


@njit(cache=True, nogil=True)
def _retime(graph, order, left, right):
    """Bring `start` up to date after the exchange, keeping old values; return the number of changes."""
    topological, position, start, previous, following = (
        order.topological,
        order.position,
        order.start,
        order.previous,
        order.following,
    )
    source, sink, delay, duration = graph.source, graph.sink, graph.delay, graph.duration
    moved, old_start = order.moved, order.old_start
    count = 0
    reach = position[left]
    if following[left] >= 0:
        reach = max(reach, position[following[left]])
    at = position[right]
    while at <= reach:
        op = topological[at]
        earliest = _earliest(op, previous, start, source, delay, duration)
        if earliest != start[op]:
            moved[count], old_start[count] = op, start[op]
            count += 1
            start[op] = earliest
            if following[op] >= 0:
                reach = max(reach, position[following[op]])
            if sink[op] >= 0:
                reach = max(reach, position[sink[op]])
        at += 1
    return count
