"""What both annealings share, compiled by numba: swap two neighbours on a rank, re-time what changes, undo.

Invariants (tests/unit/schedule/test_swaps.py): orders never deadlock, because a swap that would close a cycle is refused; re-timing what changed gives
the same starts as timing everything; an undone swap leaves nothing behind.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.schedule.constraint_model import Scales, activation_ticks
from verl_fuse.schedule.table import OpTable, Orders
from verl_fuse.spec.arrays import Ints


class OpGraph(NamedTuple):
    """What no order changes, by op: its input and its consumer (-1: none), ticks of time, `change` of memory on its `rank`; ops of one `fifo` (pipeline, stage and kind) stay in order."""

    source: Ints
    sink: Ints
    delay: Ints
    duration: Ints
    change: Ints
    rank: Ints
    fifo: Ints


class TimedOrders(NamedTuple):
    """Running orders with their times: each op's neighbours on its rank (-1: none), the last op of each rank, memory `held` after each op, start times,
    a topological order `line` of all ops and its inverse `place`. The rest is for `undo`: the stretch `old` of the line and its `span` (first place, length),
    the ops `moved` in time and their `past` starts; `marked` is scratch."""

    ahead: Ints
    behind: Ints
    last: Ints
    held: Ints
    start: Ints
    line: Ints
    place: Ints
    old: Ints
    span: Ints
    moved: Ints
    past: Ints
    marked: NDArray[np.bool_]


def graph_of(table: OpTable, scales: Scales) -> OpGraph:
    count, ticks = len(table), scales.time.ticks
    sink = np.full(count, -1, dtype=np.int64)
    consumed = np.flatnonzero(table.before >= 0)
    sink[table.before[consumed]] = consumed
    change = np.array([activation_ticks(table, scales, op) for op in range(count)], dtype=np.int64)
    return OpGraph(
        source=table.before,
        sink=sink,
        delay=np.array([ticks(d) for d in table.delay.tolist()], dtype=np.int64),
        duration=np.array([max(1, ticks(d)) for d in table.duration.tolist()], dtype=np.int64),
        change=np.where(table.kind == 1, -change, change),
        rank=table.rank,
        fifo=(table.pipeline * count + table.stage) * 2 + table.kind,
    )


def order_of(net: OpGraph, orders: Orders) -> TimedOrders:
    """The earliest-start schedule of orders that do not deadlock."""
    count = len(net.source)
    ahead, behind = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    held = np.zeros(count, dtype=np.int64)
    for order in orders:
        ids = np.asarray(order, dtype=np.int64)
        ahead[ids[1:]], behind[ids[:-1]] = ids[:-1], ids[1:]
        held[ids] = np.cumsum(net.change[ids])
    last = np.array([order[-1] if order else -1 for order in orders], dtype=np.int64)
    start, line, place, old, moved, past = (np.zeros(count, dtype=np.int64) for _ in range(6))
    span, marked = np.zeros(2, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    found = TimedOrders(ahead, behind, last, held, start, line, place, old, span, moved, past, marked)
    time_all(net, found)
    return found


def orders_from(table: OpTable, ahead: Ints) -> list[list[int]]:
    """Running orders from each op's neighbour ahead."""
    follower = {int(left): op for op, left in enumerate(ahead.tolist()) if left >= 0}
    orders = []
    for ids in table.on_rank:
        order = [op for op in ids.tolist() if ahead[op] < 0]
        while order and order[-1] in follower:
            order.append(follower[order[-1]])
        orders.append(order)
    return orders


@njit(cache=True, nogil=True)
def time_all(net, order):
    """Fill `start`, `line` and `place`; returns the number of ops reached (fewer than all: a cycle)."""
    count = len(net.source)
    waits = np.zeros(count, np.int64)
    first, last = 0, 0
    for op in range(count):
        waits[op] = (order.ahead[op] >= 0) + (net.source[op] >= 0)
        if waits[op] == 0:
            order.line[last] = op
            last += 1
    while first < last:
        op = order.line[first]
        order.place[op] = first
        first += 1
        order.start[op] = _earliest(op, order.ahead, order.start, net.source, net.delay, net.duration)
        for other in (order.behind[op], net.sink[op]):
            if other >= 0:
                waits[other] -= 1
                if waits[other] == 0:
                    order.line[last] = other
                    last += 1
    return last


@njit(cache=True, nogil=True)
def end_of(net, order):
    end, start, duration = 0, order.start, net.duration
    for op in order.last:
        if op >= 0:
            end = max(end, start[op] + duration[op])
    return end


@njit(cache=True, nogil=True)
def swap(net, order, left, right):
    """Run `right`, which follows `left` on its rank, before it; returns how many ops were re-timed, or -1 (nothing done) when that closes a cycle."""
    if not _reorder(net, order, left, right):
        return -1
    _exchange(net, order, left, right)
    return _retime(net, order, left, right)


@njit(cache=True, nogil=True)
def undo(net, order, left, right, retimed):
    """Take back the last swap, which re-timed `retimed` ops."""
    for at in range(retimed):
        order.start[order.moved[at]] = order.past[at]
    _exchange(net, order, right, left)
    first, length = order.span
    for at in range(length):
        op = order.old[at]
        order.line[first + at] = op
        order.place[op] = first + at


@njit(cache=True, nogil=True)
def _earliest(op, ahead, start, source, delay, duration):
    """Takes arrays: handing over a tuple of them for every op would cost more than the rest."""
    earliest = 0
    other = ahead[op]
    if other >= 0:
        earliest = start[other] + duration[other]
    other = source[op]
    if other >= 0:
        earliest = max(earliest, start[other] + duration[other] + delay[op])
    return earliest


@njit(cache=True, nogil=True)
def _exchange(net, order, left, right):
    """Exchange two neighbours of a rank, and the memory held after them."""
    ahead, behind, held = order.ahead, order.behind, order.held
    outer_left, outer_right = ahead[left], behind[right]
    held[left], held[right] = held[right], held[left] - net.change[left] + net.change[right]
    ahead[right], behind[right] = outer_left, left
    ahead[left], behind[left] = right, outer_right
    if outer_left >= 0:
        behind[outer_left] = right
    if outer_right >= 0:
        ahead[outer_right] = left
    else:
        order.last[net.rank[left]] = left


@njit(cache=True, nogil=True)
def _reorder(net, order, left, right):
    """Move `left` and what depends on it behind `right` in the line; False (nothing moved) on a cycle."""
    line, place, marked, old, ahead, sources = order.line, order.place, order.marked, order.old, order.ahead, net.source
    first, last = place[left], place[right]
    order.span[0], order.span[1] = first, last + 1 - first
    kept = 0
    for at in range(first, last + 1):
        op = line[at]
        old[at - first] = op
        source, before = sources[op], ahead[op]
        marked[op] = op == left or (source >= 0 and marked[source]) or (op != right and before >= 0 and marked[before])
        kept += not marked[op]
    cyclic = marked[right]
    free, moved = first, first + kept
    for at in range(last + 1 - first):
        op = old[at]
        if not cyclic:
            if marked[op]:
                line[moved], place[op] = op, moved
                moved += 1
            else:
                line[free], place[op] = op, free
                free += 1
    for at in range(last + 1 - first):
        marked[old[at]] = False
    return not cyclic


@njit(cache=True, nogil=True)
def _retime(net, order, left, right):
    """Bring `start` up to date after the exchange, keeping old values; returns how many changed."""
    line, place, start, ahead, behind = order.line, order.place, order.start, order.ahead, order.behind
    source, sink, delay, duration = net.source, net.sink, net.delay, net.duration
    moved, past = order.moved, order.past
    count = 0
    reach = place[left]
    if behind[left] >= 0:
        reach = max(reach, place[behind[left]])
    at = place[right]
    while at <= reach:
        op = line[at]
        earliest = _earliest(op, ahead, start, source, delay, duration)
        if earliest != start[op]:
            moved[count], past[count] = op, start[op]
            count += 1
            start[op] = earliest
            if behind[op] >= 0:
                reach = max(reach, place[behind[op]])
            if sink[op] >= 0:
                reach = max(reach, place[sink[op]])
        at += 1
    return count
