"""Compiled swaps against plain timing."""

import random

import numpy as np
import pytest
from problems import PUBLISHED, published, random_problem, two_ranks

from verl_fuse.schedule import swap_kernel
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales
from verl_fuse.schedule.timing import earliest_starts


def swappable(graph: swap_kernel.OpGraph, order: swap_kernel.TimedOrders) -> list[int]:
    ops = np.flatnonzero(order.previous >= 0)
    return [
        op
        for op in ops.tolist()
        if graph.fifo[order.previous[op]] != graph.fifo[op] and graph.source[op] != order.previous[op]
    ]


def snapshot(order: swap_kernel.TimedOrders) -> list[list[int]]:
    return [
        getattr(order, name).tolist()
        for name in ("previous", "following", "last", "held", "start", "topological", "position")
    ]


@pytest.mark.parametrize("problem", [published(PUBLISHED[1]), two_ranks(4, transfer=1.0), random_problem(5)])
def test_swaps_re_time_what_they_change_and_can_be_undone(problem):
    table, draw = OpTable(problem), random.Random(0)
    graph = swap_kernel.graph_of(table, scales(table))
    order = swap_kernel.order_of(graph, candidates(table, float("inf"))[0].orders)
    for _ in range(200):
        right = draw.choice(swappable(graph, order))
        left, before = int(order.previous[right]), snapshot(order)
        retimed = swap_kernel.swap(graph, order, left, right)
        if retimed >= 0 and draw.random() < 0.5:
            swap_kernel.undo(graph, order, left, right, retimed)
            retimed = -1
        if retimed < 0:
            assert snapshot(order) == before
    rows = swap_kernel.orders_from(table, order.previous)
    fresh = swap_kernel.order_of(graph, rows)
    assert fresh.start.tolist() == order.start.tolist()
    assert fresh.held.tolist() == order.held.tolist()
    assert sorted(order.topological.tolist()) == list(range(len(table)))
    starts = earliest_starts(table, rows)
    assert starts is not None
    assert [scales(table).time.ticks(s) for s in starts.tolist()] == pytest.approx(order.start.tolist(), abs=len(table))


def test_a_swap_that_closes_a_cycle_is_refused():
    """Rank 1 cannot run micro-batch 0 backward before its forward has come through rank 0's forward,
    wherever the swap is tried."""
    table = OpTable(two_ranks(1))
    graph = swap_kernel.graph_of(table, scales(table))
    order = swap_kernel.order_of(graph, candidates(table, float("inf"))[0].orders)
    for op in range(len(table)):
        left = int(order.previous[op])
        if left >= 0 and graph.source[op] == left:
            before = snapshot(order)
            assert swap_kernel.swap(graph, order, left, op) == -1
            assert snapshot(order) == before
            return
    raise AssertionError("no op follows its own input")
