"""Does greedy list scheduling, compiled by numba, with priorities that a search can turn.

Invariants (tests/unit/schedule/test_priorities.py): with neutral priorities it builds the same orders
as `greedy.list_schedule`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from verl_fuse.spec.arrays import Ints


class DispatchTables(NamedTuple):
    """The data that no priority changes. A stage belongs to one pipeline; -1 is none; times and memory are in ticks.

    `stages[rank]` lists the rank's stages, `rank`, `upstream`, `downstream`, `microbatches` and `activation` belong
    to a stage, `first[stage, kind]` is its first op; `source`, `delay`, `duration` and `urgency` (longest path to
    the end) belong to an op.
    """

    stages: Ints
    rank: Ints
    upstream: Ints
    downstream: Ints
    microbatches: Ints
    activation: Ints
    first: Ints
    source: Ints
    delay: Ints
    duration: Ints
    urgency: Ints
    capacity: int


@njit(cache=True, nogil=True)
def dispatch(shop, limits, bias, start):
    """Fill `start` for every op; return the makespan, or -1 when every rank is stuck for memory.

    `limits[stage]` bounds the micro-batches in flight, `bias[stage, kind]` is added to the urgency of the stage's ops.
    One function does all: handing a tuple of arrays to another for every op would cost more than the rest.
    """
    (
        stages,
        rank_of,
        upstream,
        downstream,
        microbatches,
        activation,
        first,
        source,
        delay,
        duration,
        urgency,
        capacity,
    ) = shop
    ranks, width = stages.shape
    start[:] = -1
    done = np.zeros((len(rank_of), 2), np.int64)
    free, held = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    ready = np.zeros((width, 2), np.int64)
    # The next op of each rank: (start, op, stage, kind), op -1 when nothing can run; `stale` lists the ranks whose
    # choice may have changed.
    next_start, next_op = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    next_stage, next_kind = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    stale, fresh = np.arange(ranks), ranks
    end, left = 0, len(source)
    while True:
        for rank in stale[:fresh]:
            soonest = np.int64(1) << 60
            for at in range(width):
                stage = stages[rank, at]
                for kind in range(2):
                    ready[at, kind] = -1
                    if stage < 0 or done[stage, kind] == microbatches[stage]:
                        continue
                    op = first[stage, kind] + done[stage, kind]
                    if source[op] >= 0 and start[source[op]] < 0:
                        continue
                    if kind == 0 and (
                        done[stage, 0] - done[stage, 1] >= limits[stage] or held[rank] + activation[stage] > capacity
                    ):
                        continue
                    ready[at, kind] = free[rank]
                    if source[op] >= 0:
                        ready[at, kind] = max(free[rank], start[source[op]] + duration[source[op]] + delay[op])
                    soonest = min(soonest, ready[at, kind] + duration[op])
            next_op[rank] = -1
            best = np.int64(0)
            for at in range(width):
                stage = stages[rank, at]
                for kind in range(2):
                    if ready[at, kind] < 0 or ready[at, kind] >= soonest:
                        continue
                    op = first[stage, kind] + done[stage, kind]
                    value = urgency[op] + bias[stage, kind]
                    if (
                        next_op[rank] < 0
                        or value > best
                        or (value == best and (ready[at, kind], op) < (next_start[rank], next_op[rank]))
                    ):
                        best = value
                        next_start[rank], next_op[rank] = ready[at, kind], op
                        next_stage[rank], next_kind[rank] = stage, kind
        rank = -1
        for other in range(ranks):
            if next_op[other] >= 0 and (
                rank < 0 or (next_start[other], next_op[other]) < (next_start[rank], next_op[rank])
            ):
                rank = other
        if rank < 0:
            return end if left == 0 else -1
        op, stage, kind = next_op[rank], next_stage[rank], next_kind[rank]
        start[op] = next_start[rank]
        free[rank] = start[op] + duration[op]
        end = max(end, free[rank])
        left -= 1
        done[stage, kind] += 1
        held[rank] += activation[stage] if kind == 0 else -activation[stage]
        neighbour = downstream[stage] if kind == 0 else upstream[stage]
        stale[0], fresh = rank, 1
        if neighbour >= 0:
            stale[1], fresh = rank_of[neighbour], 2
