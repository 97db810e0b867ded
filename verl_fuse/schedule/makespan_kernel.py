"""Anneals the makespan, compiled by numba: swaps ops on a critical path within a memory capacity.

Swapping neighbours of a critical path cannot close a cycle and is the only adjacent swap that can shorten the schedule
(van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated annealing", 1992).

Invariants (tests/unit/schedule/test_makespan_annealing.py): orders keep each fifo's micro-batches in order and stay
within the capacity, because only such swaps are tried.
"""

import numpy as np
from numba import njit

from verl_fuse.schedule.swap_kernel import end_of, swap, undo


@njit(cache=True, nogil=True)
def anneal_makespan(graph, order, seed, steps, hot, cold, target, capacity, best, best_previous):
    """Try `steps` swaps while the temperature falls from `hot` to `cold` ticks; stops at `target`.

    Return the best makespan and leave its orders in `best_previous` (`best`, untouched, if none was better).
    """
    np.random.seed(seed)
    found = np.zeros(len(graph.source), np.int64)
    now = end_of(graph, order)
    if now < best:
        best = now
        best_previous[:] = order.previous
    for step in range(steps):
        if best <= target:
            break
        swaps = _critical_swaps(graph, order, now, found)
        if swaps == 0:
            break
        right = found[np.random.randint(swaps)]
        left = order.previous[right]
        if graph.change[right] > 0 and order.held[left] - graph.change[left] + graph.change[right] > capacity:
            continue
        retimed = swap(graph, order, left, right)
        if retimed < 0:
            continue
        then = end_of(graph, order)
        if then <= now or np.random.random() < np.exp((now - then) / (hot * (cold / hot) ** (step / steps))):
            now = then
            if now < best:
                best = now
                best_previous[:] = order.previous
        else:
            undo(graph, order, left, right, retimed)
    return best


@njit(cache=True, nogil=True)
def _critical_swaps(graph, order, end, found):
    """Find ops on one random critical path that follow, on their rank, an op of another fifo without idle time; return
    their number."""
    start, previous, last = order.start, order.previous, order.last
    source, delay, duration, fifo = graph.source, graph.delay, graph.duration, graph.fifo
    rank = np.random.randint(len(last))
    while last[rank] < 0 or start[last[rank]] + duration[last[rank]] != end:
        rank = rank + 1 if rank + 1 < len(last) else 0
    op = last[rank]
    swaps = 0
    while True:
        left, origin = previous[op], source[op]
        by_rank = left >= 0 and start[left] + duration[left] == start[op]
        by_input = origin >= 0 and start[origin] + duration[origin] + delay[op] == start[op]
        if by_rank and origin != left and fifo[left] != fifo[op]:
            found[swaps] = op
            swaps += 1
        if by_rank and (not by_input or np.random.random() < 0.5):
            op = left
        elif by_input:
            op = origin
        else:
            return swaps
