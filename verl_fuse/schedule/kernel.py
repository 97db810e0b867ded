"""The inner loop of the annealing, compiled by numba: swap two neighbours on a critical path, re-time what changes, accept or undo.

Invariants (tests/unit/schedule/test_annealed.py): orders never deadlock, keep each lane's micro-batches in order and stay within the capacity, because
only an accepted swap is kept; re-timing what changed gives the same starts as timing everything.

Swapping neighbours of a critical path cannot close a cycle and is the only adjacent swap that can shorten the schedule
(van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated annealing", 1992).

Names: `ahead[i]` and `behind[i]` are op i's neighbours on its rank, `source[i]` and `sink[i]` its input and its consumer; -1 is none. `line` is a
topological order of all ops and `place` its inverse.
"""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def time_all(ahead, behind, source, sink, delay, duration, start, line):
    """Fill `start` and `line`; returns the number of ops reached (fewer than all: a cycle)."""
    count = len(ahead)
    waits = np.zeros(count, np.int64)
    first, last = 0, 0
    for op in range(count):
        waits[op] = (ahead[op] >= 0) + (source[op] >= 0)
        if waits[op] == 0:
            line[last] = op
            last += 1
    while first < last:
        op = line[first]
        first += 1
        start[op] = _earliest(op, ahead, source, delay, duration, start)
        for other in (behind[op], sink[op]):
            if other >= 0:
                waits[other] -= 1
                if waits[other] == 0:
                    line[last] = other
                    last += 1
    return last


@njit(cache=True, nogil=True)
def _earliest(op, ahead, source, delay, duration, start):
    earliest = 0
    other = ahead[op]
    if other >= 0:
        earliest = start[other] + duration[other]
    other = source[op]
    if other >= 0:
        earliest = max(earliest, start[other] + duration[other] + delay[op])
    return earliest


@njit(cache=True, nogil=True)
def _critical_swaps(end, ends_last, ahead, source, delay, duration, lane, start, found):
    """Ops on one random critical path that follow, on their rank, an op of another lane without idle time; returns how many."""
    rank = np.random.randint(len(ends_last))
    while ends_last[rank] < 0 or start[ends_last[rank]] + duration[ends_last[rank]] != end:
        rank = rank + 1 if rank + 1 < len(ends_last) else 0
    op = ends_last[rank]
    swaps = 0
    while True:
        left, origin = ahead[op], source[op]
        by_rank = left >= 0 and start[left] + duration[left] == start[op]
        by_input = origin >= 0 and start[origin] + duration[origin] + delay[op] == start[op]
        if by_rank and origin != left and lane[left] != lane[op]:
            found[swaps] = op
            swaps += 1
        if by_rank and (not by_input or np.random.random() < 0.5):
            op = left
        elif by_input:
            op = origin
        else:
            return swaps


@njit(cache=True, nogil=True)
def _exchange(ahead, behind, left, right):
    """Exchange two neighbours of a rank."""
    outer_left, outer_right = ahead[left], behind[right]
    ahead[right], behind[right] = outer_left, left
    ahead[left], behind[left] = right, outer_right
    if outer_left >= 0:
        behind[outer_left] = right
    if outer_right >= 0:
        ahead[outer_right] = left


@njit(cache=True, nogil=True)
def _reorder(left, right, ahead, source, line, place, marked, old):
    """Move `left` and what depends on it behind `right` in `line`, keeping the old stretch in `old`; False (nothing moved) on a cycle."""
    first, last = place[left], place[right]
    held = 0
    for at in range(first, last + 1):
        op = line[at]
        old[at - first] = op
        depends = (
            op == left
            or (source[op] >= 0 and marked[source[op]])
            or (op != right and ahead[op] >= 0 and marked[ahead[op]])
        )
        marked[op] = depends
        held += depends
    cyclic = marked[right]
    free, moved = first, last + 1 - held
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
def _retime(left, right, ahead, behind, source, sink, delay, duration, start, line, place, changed, before):
    """Bring `start` up to date after the exchange, logging old values; returns how many changed."""
    log = 0
    reach = place[left]
    if behind[left] >= 0:
        reach = max(reach, place[behind[left]])
    at = place[right]
    while at <= reach:
        op = line[at]
        earliest = _earliest(op, ahead, source, delay, duration, start)
        if earliest != start[op]:
            changed[log], before[log] = op, start[op]
            log += 1
            start[op] = earliest
            if behind[op] >= 0:
                reach = max(reach, place[behind[op]])
            if sink[op] >= 0:
                reach = max(reach, place[sink[op]])
        at += 1
    return log


@njit(cache=True, nogil=True)
def _end(last, duration, start):
    end = 0
    for op in last:
        if op >= 0:
            end = max(end, start[op] + duration[op])
    return end


@njit(cache=True, nogil=True)
def anneal(
    seed,
    steps,
    hot,
    cold,
    target,
    capacity,
    ahead,
    behind,
    last,
    rank,
    held,
    source,
    sink,
    delay,
    duration,
    lane,
    change,
    best,
    best_ahead,
):
    """Run `steps` swaps while the temperature falls from `hot` to `cold`; stops at `target`. Returns the best makespan (`best` if none was better).

    `last[r]` is the last op of rank r (-1: none), `held[i]` the memory on the rank after op i, `change[i]` what op i adds, `capacity` what a rank may hold.
    """
    np.random.seed(seed)
    count = len(ahead)
    start, line, place = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    found, old = np.zeros(count, np.int64), np.zeros(count, np.int64)
    changed, before = np.zeros(count, np.int64), np.zeros(count, np.int64)
    marked = np.zeros(count, np.bool_)
    time_all(ahead, behind, source, sink, delay, duration, start, line)
    for at in range(count):
        place[line[at]] = at
    now = _end(last, duration, start)
    if now < best:
        best = now
        best_ahead[:] = ahead
    for step in range(steps):
        if best <= target:
            break
        swaps = _critical_swaps(now, last, ahead, source, delay, duration, lane, start, found)
        if swaps == 0:
            break
        right = found[np.random.randint(swaps)]
        left = ahead[right]
        base = held[left] - change[left]
        if change[right] > 0 and base + change[right] > capacity:
            continue
        first, stretch = place[left], place[right] + 1 - place[left]
        if not _reorder(left, right, ahead, source, line, place, marked, old):
            continue
        _exchange(ahead, behind, left, right)
        if last[rank[right]] == right:
            last[rank[right]] = left
        log = _retime(left, right, ahead, behind, source, sink, delay, duration, start, line, place, changed, before)
        then = _end(last, duration, start)
        if then <= now or np.random.random() < np.exp((now - then) / (hot * (cold / hot) ** (step / steps))):
            held[left], held[right] = held[right], base + change[right]
            now = then
            if now < best:
                best = now
                best_ahead[:] = ahead
            continue
        for at in range(log):
            start[changed[at]] = before[at]
        _exchange(ahead, behind, right, left)
        if last[rank[right]] == left:
            last[rank[right]] = right
        for at in range(stretch):
            line[first + at] = old[at]
            place[old[at]] = first + at
    return best
