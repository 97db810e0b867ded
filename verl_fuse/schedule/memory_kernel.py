"""Anneals memory, compiled by numba: makes swaps anywhere that keep a deadline.

A fast schedule often holds micro-batches for no use. Swapping neighbours that do not share a result, as long as the
schedule ends by the deadline, drains them; the energy is the square of the memory that each op finds held above the
capacity, so that the highest peaks count most.

Invariants (tests/unit/schedule/test_memory_annealing.py): the deadline is kept at every step; the energy carried along
equals the energy computed anew.
"""

import numpy as np
from numba import njit

from verl_fuse.schedule.swap_kernel import end_of, swap, undo


@njit(cache=True, nogil=True)
def energy_of(order, capacity):
    """Return the sum over ops of the squared excess over `capacity`, in square ticks."""
    total = 0.0
    for held in order.held:
        total += _excess(held, capacity)
    return total


@njit(cache=True, nogil=True)
def anneal_memory(graph, order, seed, steps, hot, cold, deadline, capacity, energy, best, best_previous):
    """Try `steps` swaps while the temperature falls from `hot` to `cold` square ticks; stop when no op is above
    `capacity`.

    `energy` is that of `order`. Return the energies reached and of the best orders, which are left in `best_previous`.
    """
    np.random.seed(seed)
    count, previous, held, source, change, fifo = (
        len(graph.source),
        order.previous,
        order.held,
        graph.source,
        graph.change,
        graph.fifo,
    )
    for step in range(steps):
        if best <= 0.0:
            break
        right = np.random.randint(count)
        left = previous[right]
        if left < 0 or fifo[left] == fifo[right] or source[right] == left:
            continue
        more = _excess(held[left] - change[left] + change[right], capacity) - _excess(held[left], capacity)
        if more > 0.0 and np.random.random() >= np.exp(-more / (hot * (cold / hot) ** (step / steps))):
            continue
        retimed = swap(graph, order, left, right)
        if retimed < 0:
            continue
        if end_of(graph, order) > deadline:
            undo(graph, order, left, right, retimed)
            continue
        energy += more
        if energy < best:
            best = energy
            best_previous[:] = order.previous
    return energy, best


@njit(cache=True, nogil=True)
def _excess(held, capacity):
    over = float(max(0, held - capacity))
    return over * over
