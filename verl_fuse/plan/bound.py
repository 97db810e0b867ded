"""Computes lower bounds on the seconds per step of every plan that completes a partial plan.

The graph falls into blocks in series (in PPO: generation, inference, training): everything in a block waits for
everything in the block before. Per block, none of these can be beaten: its longest chain; its work spread over all
devices; the calls fixed on one device, one after another; two or three unordered calls on any numbers of devices, calls
that do not fit beside each other one after the other. The blocks add up. Moves of weights of already fixed calls
lengthen the path through the train call they wait for. Independently, no device can be busy for longer than a step.

A deferred call is in no block, since the next step does not wait for it. Independently, it and a call that uses its
weights take turns, step after step, and the work of all calls has to fit on all devices.

Invariant (tests/unit/plan/test_bound.py): the bound of a partial plan never exceeds the exact time of any completion.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.evaluate import move_seconds
from verl_fuse.plan.packing import three_calls
from verl_fuse.plan.tables import PlanTables, Scalar


class Relaxation(NamedTuple):
    """The data that a bound needs besides the tables: per call the least over its options, and the blocks in series."""

    lowest: NDArray[np.float64]  # n, seconds
    lowest_area: NDArray[np.float64]  # n, devices x seconds
    within: NDArray[np.float64]  # n x (devices + 1), least seconds on at most so many devices
    pair: NDArray[
        np.float64
    ]  # n x n, least seconds in which both calls are done, for unordered calls of one block; else 0
    floor: NDArray[np.float64]  # n, least seconds of each block by its calls three at a time
    block: NDArray[np.int64]  # n, in order; -1: deferred
    ordered: NDArray[np.bool_]  # n x n, transitive closure of `before`


def relax(t: PlanTables) -> Relaxation:
    """Precompute the relaxation; a call without options makes every bound infinite."""
    n = t.before.shape[0]
    ordered = t.before.copy()
    for middle in range(n):
        ordered |= ordered[:, middle : middle + 1] & ordered[middle : middle + 1, :]
    lowest, area = np.full(n, np.inf), np.full(n, np.inf)
    within = np.full((n, t.devices + 1), np.inf)
    for c in range(n):
        span = slice(t.begin[c], t.begin[c + 1])
        sizes = t.end[span] - t.first[span]
        np.minimum.at(within[c], sizes, t.seconds[span])
        within[c] = np.minimum.accumulate(within[c])
        lowest[c] = within[c, -1]
        area[c] = np.min(t.seconds[span] * sizes, initial=np.inf)
    block = _blocks(ordered, t.deferred)
    pair = np.zeros((n, n))
    for a in range(n):
        for b in range(n):
            if a != b and block[a] == block[b] and not ordered[a, b] and not ordered[b, a]:
                beside = np.min(np.maximum(within[a, 1:-1], within[b, -2:0:-1]), initial=np.inf)
                pair[a, b] = min(lowest[a] + lowest[b], beside)
    floor = np.zeros(n)
    raise_floor(within, block, ordered, floor)
    return Relaxation(lowest, area, within, pair, floor, block, ordered)


def least_seconds(t: PlanTables) -> float:
    """Return seconds that no plan of the tables can beat."""
    return float(lower_bound(t, relax(t), np.full(t.before.shape[0], -1, np.int64)))


@njit(cache=True)
def raise_floor(
    within: NDArray[np.float64], block: NDArray[np.int64], ordered: NDArray[np.bool_], floor: NDArray[np.float64]
) -> None:
    """Raise the floor of each block to the seconds that three of its unordered calls need; rows of `within` that are
    nan are left out."""
    n = block.size
    for a in range(n):
        for b in range(a + 1, n):
            for c in range(b + 1, n):
                alike = block[a] == block[b] == block[c]
                free = not (np.isnan(within[a, 0]) or np.isnan(within[b, 0]) or np.isnan(within[c, 0]))
                chained = (
                    ordered[a, b] or ordered[b, a] or ordered[a, c] or ordered[c, a] or ordered[b, c] or ordered[c, b]
                )
                if alike and free and not chained:
                    floor[block[a]] = max(floor[block[a]], three_calls(within[a], within[b], within[c]))


def _blocks(ordered: NDArray[np.bool_], deferred: int) -> NDArray[np.int64]:
    """Cut the calls (in topological order) wherever everything before the cut is ordered before everything after it,
    the deferred one left out."""
    n = ordered.shape[0]
    block = np.full(n, -1, np.int64)
    # Ancestors come first; calls of one depth are interchangeable.
    by_depth = sorted((c for c in range(n) if c != deferred), key=lambda c: (int(ordered[:, c].sum()), c))
    current = 0
    for i, c in enumerate(by_depth):
        if i and all(ordered[a, b] for a in by_depth[:i] for b in by_depth[i:]):
            current += 1
        block[c] = current
    return block


@njit(cache=True)
def lower_bound(t: PlanTables, r: Relaxation, choice: NDArray[np.int64]) -> float:
    """Return seconds that no completion of `choice` (option per call, -1: free) can beat."""
    return tightened_bound(t, r, choice, r.lowest, r.lowest_area, r.floor)


@njit(cache=True)
def tightened_bound(
    t: PlanTables,
    r: Relaxation,
    choice: NDArray[np.int64],
    lowest: NDArray[np.float64],
    lowest_area: NDArray[np.float64],
    floor: NDArray[np.float64],
) -> float:
    """Return the bound if free calls take at least `lowest` seconds and `lowest_area` devices x seconds (n), and a
    block at least its `floor` (n)."""
    n = choice.size
    blocks = 0
    for c in range(n):
        blocks = max(blocks, r.block[c] + 1)
    least = np.zeros(blocks)
    area = np.zeros(blocks)
    finish = np.zeros(n)
    for c in range(n):
        o = choice[c]
        b = r.block[c]
        if b < 0:
            continue
        seconds = lowest[c] if o < 0 else t.seconds[o]
        area[b] += lowest_area[c] if o < 0 else seconds * (t.end[o] - t.first[o])
        finish[c] = seconds
        for p in range(n):
            if r.block[p] == b and r.ordered[p, c]:
                finish[c] = max(finish[c], finish[p] + seconds)
        least[b] = max(least[b], finish[c])
    for c in range(n):
        o = choice[c]
        b = r.block[c]
        if b < 0:
            continue
        load = 0.0
        for p in range(n):
            if r.block[p] != b:
                continue
            q = choice[p]
            if o >= 0 and q >= 0 and t.first[q] <= t.first[o] < t.end[q]:
                load += t.seconds[q]
            if p == c or r.pair[c, p] == 0.0 or q >= 0:
                continue
            if o < 0:
                least[b] = max(least[b], r.pair[c, p])
            else:
                room = max(t.first[o], t.devices - t.end[o])
                beside = max(t.seconds[o], max(lowest[p], r.within[p, room]))
                least[b] = max(least[b], min(beside, t.seconds[o] + lowest[p]))
        least[b] = max(least[b], load)
    total = 0.0
    for b in range(blocks):
        least[b] = max(max(least[b], floor[b]), area[b] / t.devices)
        total += least[b]
    if t.deferred >= 0:
        total = max(total, _beside(t, r, choice, lowest, lowest_area))
    return max(_with_moves(t, r, choice, least, total), _busiest_device(t, choice))


@njit(cache=True)
def _beside(
    t: PlanTables,
    r: Relaxation,
    choice: NDArray[np.int64],
    lowest: NDArray[np.float64],
    lowest_area: NDArray[np.float64],
) -> Scalar:
    """Return the seconds of a step with a deferred call, whichever calls are beside it: all work on all devices, and
    its turns with the calls that use its weights."""
    work = 0.0
    late = t.deferred
    trains = lowest[late] if choice[late] < 0 else t.seconds[choice[late]]
    longest = 0.0
    for c in range(choice.size):
        o = choice[c]
        seconds = lowest[c] if o < 0 else t.seconds[o]
        work += lowest_area[c] if o < 0 else seconds * (t.end[o] - t.first[o])
        if t.source[c] == late and r.ordered[c, late]:
            longest = max(longest, trains + seconds)
    return max(longest, work / t.devices)


@njit(cache=True)
def _with_moves(
    t: PlanTables, r: Relaxation, choice: NDArray[np.int64], least: NDArray[np.float64], total: float
) -> float:
    """Lengthen the path train call -> move -> call of the first block, which waits for nothing else."""
    longest = total
    for c in range(choice.size):
        s = t.source[c]
        if r.block[c] != 0 or s < 0 or s == t.deferred or choice[c] < 0 or choice[s] < 0:
            continue
        before = 0.0
        after = 0.0
        for b in range(least.size):
            if b < r.block[s]:
                before += least[b]
            else:
                after += least[b]
        chain = t.seconds[choice[s]] + _move_at_least(t, choice[s], choice[c])
        longest = max(longest, before + max(after, chain))
    return longest


@njit(cache=True)
def _busiest_device(t: PlanTables, choice: NDArray[np.int64]) -> Scalar:
    """Return the seconds of all fixed calls and their moves on the busiest device."""
    busiest = 0.0
    for c in range(choice.size):
        if choice[c] < 0:
            continue
        device = t.first[choice[c]]
        busy = 0.0
        for p in range(choice.size):
            o = choice[p]
            if o < 0:
                continue
            here = t.first[o] <= device < t.end[o]
            if here:
                busy += t.seconds[o]
            s = t.source[p]
            if s >= 0 and choice[s] >= 0 and (here or t.first[choice[s]] <= device < t.end[choice[s]]):
                busy += _move_at_least(t, choice[s], o)
        busiest = max(busiest, busy)
    return busiest


@njit(cache=True, inline="always")
def _move_at_least(t: PlanTables, train: Scalar, user: Scalar) -> Scalar:
    """Return the least seconds of a move: a move that is not filled in yet may be free."""
    seconds = move_seconds(t, train, user)
    return 0.0 if np.isnan(seconds) else seconds
