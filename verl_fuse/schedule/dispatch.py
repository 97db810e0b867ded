"""Greedy list scheduling compiled by numba, with priorities that a search can turn.

Invariants (tests/unit/schedule/test_priorities.py): with neutral priorities it builds the same orders as `greedy.list_schedule`.
"""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _choose(
    rank,
    lanes,
    done,
    microbatches,
    first,
    limits,
    activation,
    capacity,
    free,
    held,
    source,
    delay,
    duration,
    urgency,
    bias,
    start,
    pick,
):
    """Write the rank's next (start, op, lane, kind) into `pick`; op -1 when nothing can run.

    `lanes` lists the rank's lanes (-1: none), `first[lane, kind]` their first op; ops that have not run have start -1.
    """
    soonest = np.int64(1) << 60
    for kind in range(2):
        for at in range(lanes.shape[1]):
            lane = lanes[rank, at]
            if lane < 0 or done[lane, kind] == microbatches[lane]:
                continue
            op = first[lane, kind] + done[lane, kind]
            ready = _ready(
                op, kind, lane, rank, done, limits, activation, capacity, free, held, source, delay, duration, start
            )
            if ready >= 0:
                soonest = min(soonest, ready + duration[op])
    pick[rank, 1] = -1
    best = -(np.int64(1) << 60)
    for kind in range(2):
        for at in range(lanes.shape[1]):
            lane = lanes[rank, at]
            if lane < 0 or done[lane, kind] == microbatches[lane]:
                continue
            op = first[lane, kind] + done[lane, kind]
            ready = _ready(
                op, kind, lane, rank, done, limits, activation, capacity, free, held, source, delay, duration, start
            )
            if ready < 0 or ready >= soonest:
                continue
            value = urgency[op] + bias[lane, kind]
            if value > best or (
                value == best and (ready < pick[rank, 0] or (ready == pick[rank, 0] and op < pick[rank, 1]))
            ):
                best = value
                pick[rank, 0], pick[rank, 1], pick[rank, 2], pick[rank, 3] = ready, op, lane, kind


@njit(cache=True, nogil=True)
def _ready(op, kind, lane, rank, done, limits, activation, capacity, free, held, source, delay, duration, start):
    """Earliest start of an op, or -1 when its input is missing or memory is short."""
    other = source[op]
    if other >= 0 and start[other] < 0:
        return -1
    if kind == 0 and (done[lane, 0] - done[lane, 1] >= limits[lane] or held[rank] + activation[lane] > capacity):
        return -1
    ready = free[rank]
    if other >= 0:
        ready = max(ready, start[other] + duration[other] + delay[op])
    return ready


@njit(cache=True, nogil=True)
def dispatch(
    lanes,
    lane_rank,
    lane_before,
    lane_after,
    microbatches,
    first,
    activation,
    limits,
    capacity,
    source,
    delay,
    duration,
    urgency,
    bias,
    start,
):
    """Fill `start` for every op; returns the makespan, or -1 when every rank is stuck for memory."""
    ranks = lanes.shape[0]
    start[:] = -1
    done = np.zeros((len(lane_rank), 2), np.int64)
    free, held = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    pick = np.zeros((ranks, 4), np.int64)
    for rank in range(ranks):
        _choose(
            rank,
            lanes,
            done,
            microbatches,
            first,
            limits,
            activation,
            capacity,
            free,
            held,
            source,
            delay,
            duration,
            urgency,
            bias,
            start,
            pick,
        )
    end = 0
    for _ in range(len(source)):
        rank = -1
        for other in range(ranks):
            if pick[other, 1] >= 0 and (
                rank < 0
                or pick[other, 0] < pick[rank, 0]
                or (pick[other, 0] == pick[rank, 0] and pick[other, 1] < pick[rank, 1])
            ):
                rank = other
        if rank < 0:
            return -1
        begin, op, lane, kind = pick[rank]
        start[op] = begin
        free[rank] = begin + duration[op]
        end = max(end, free[rank])
        done[lane, kind] += 1
        held[rank] += activation[lane] if kind == 0 else -activation[lane]
        _choose(
            rank,
            lanes,
            done,
            microbatches,
            first,
            limits,
            activation,
            capacity,
            free,
            held,
            source,
            delay,
            duration,
            urgency,
            bias,
            start,
            pick,
        )
        neighbour = lane_after[lane] if kind == 0 else lane_before[lane]
        if neighbour >= 0:
            rank = lane_rank[neighbour]
            _choose(
                rank,
                lanes,
                done,
                microbatches,
                first,
                limits,
                activation,
                capacity,
                free,
                held,
                source,
                delay,
                duration,
                urgency,
                bias,
                start,
                pick,
            )
    return end
