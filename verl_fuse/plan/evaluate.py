"""Computes the cost of a plan: seconds per step and bytes per device, exactly, in about a microsecond.

A step is the dataflow graph of its calls. A call whose placement differs from that of its role's train call is preceded
by a move of the weights, which occupies both meshes and may start once that train call of the step before has ended. An
event queue takes the node that is ready first (ties: order of the workload) and starts it when every device of its mesh
is free. Calls without predecessors wait for all calls of the step before, but for a train call that is deferred: calls
that use its weights wait for it alone, and it gives way to any call that is ready when its devices are free, moves of
weights for the next step included. Steps are unrolled until one follows another in the same rhythm; the last one, from
the end of the awaited calls to the next such end, is the answer.

Invariants (tests/unit/plan/test_evaluate.py):
- no two nodes overlap in time on a device;
- a call starts after its predecessors, its move and, without predecessors, the whole step before, a deferred call left
  out;
- a call starts after the deferred call of the step before whose weights it uses;
- two nodes on disjoint meshes do not wait for each other unless the graph has an edge between them.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.relation import relation
from verl_fuse.plan.tables import PlanTables, Scalar

EVALUATED_STEPS = 2  # the second step of a plan repeats for ever (tested on random plans)


@njit(cache=True, inline="always")
def move_seconds(t: PlanTables, train: Scalar, user: Scalar) -> Scalar:
    """Return the seconds to give option `user` the weights of the train option `train`; 0 if they share the placement,
    nan if not filled in yet."""
    if t.placement[train] == t.placement[user]:
        return 0.0
    return t.moves[move_index(t, train, user)]


@njit(cache=True, inline="always")
def move_index(t: PlanTables, train: Scalar, user: Scalar) -> Scalar:
    """Return the place of that move in `moves`."""
    between = relation(t.first[train], t.end[train], t.first[user], t.end[user], t.node)
    return t.base[t.shape[train], t.shape[user]] + between


@njit(cache=True)
def schedule(
    t: PlanTables, choice: NDArray[np.int64], steps: int, starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> Scalar:
    """Run `steps` steps of the plan `choice` (option of each call); returns the length of the last one in seconds.

    starts and ends (2n,) receive the last step's times: calls first, then their moves (nan where there is none).
    """
    n = choice.size
    # Rows: seconds of the move, when the mesh is free, when it last trained, when its move ended, seconds of the call.
    now = np.zeros((5, n))
    move, free, trained, moved, seconds = now[0], now[1], now[2], now[3], now[4]
    # Rows: calls whose mesh overlaps, calls that come before; bit c is call c.
    masks = np.zeros((2, n), np.int64)
    overlap, before = masks[0], masks[1]
    for a in range(n):
        o = choice[a]
        seconds[a] = t.seconds[o]
        if t.source[a] >= 0:
            seconds_moving = move_seconds(t, choice[t.source[a]], o)
            # A move that is not filled in yet counts as free. `descent.cost` never lets such a plan in.
            move[a] = 0.0 if np.isnan(seconds_moving) else seconds_moving
        for b in range(n):
            if t.first[o] < t.end[choice[b]] and t.first[choice[b]] < t.end[o]:
                overlap[a] |= 1 << b
            if t.before[b, a]:
                before[a] |= 1 << b
    barrier = 0.0
    length: Scalar = 0.0
    late = t.deferred
    # `owed` is True while the deferred call of the step before has not begun, `owed_ready` the time at which it could.
    owed = False
    owed_ready = 0.0
    awaited = ~(1 << late) if late >= 0 else -1
    # Beside a deferred call the second step is the first that has one of the step before.
    for _ in range(steps + (late >= 0)):
        unmoved = 0
        unfinished = (1 << n) - 1
        for c in range(n):
            moved[c] = 0.0
            starts[n + c] = np.nan
            ends[n + c] = np.nan
            if move[c] > 0.0:
                unmoved |= 1 << c
        while unfinished & awaited:
            best = late if owed else -1
            best_ready = max(owed_ready, free[late]) if owed else np.inf
            for c in range(n):
                if not unfinished >> c & 1 or (owed and (c == late or t.source[c] == late)):
                    continue
                if unmoved >> c & 1:
                    ready = trained[t.source[c]]
                elif before[c] & unfinished:
                    continue
                else:
                    ready = moved[c]
                    if late >= 0 and t.source[c] == late:
                        ready = max(ready, trained[late])
                    if before[c] == 0:
                        ready = max(ready, barrier)
                    for p in range(n):
                        if before[c] >> p & 1:
                            ready = max(ready, ends[p])
                    if c == late:
                        ready = max(ready, free[c])
                if ready < best_ready or (best == late and ready == best_ready):
                    best = c
                    best_ready = ready
            c = best
            occupied = overlap[c]
            if unmoved >> c & 1:
                s = t.source[c]
                starts[n + c] = max(best_ready, max(free[c], free[s]))
                end = moved[c] = ends[n + c] = starts[n + c] + move[c]
                occupied |= overlap[s]
                unmoved ^= 1 << c
            else:
                starts[c] = max(best_ready, free[c])
                end = ends[c] = starts[c] + seconds[c]
                if c != late:
                    unfinished ^= 1 << c
                else:
                    trained[c] = end
                    if not owed:
                        unfinished ^= 1 << c
                    owed = False
            for o in range(n):
                if occupied >> o & 1:
                    free[o] = max(free[o], end)
        if unfinished:
            # The deferred call is left: it has its times if nothing follows.
            if owed:
                free[late] = max(owed_ready, free[late]) + seconds[late]
            owed_ready = 0.0
            for p in range(n):
                if before[late] >> p & 1:
                    owed_ready = max(owed_ready, ends[p])
            owed = True
            starts[late] = max(owed_ready, free[late])
            ends[late] = starts[late] + seconds[late]
        last = 0.0
        for c in range(n):
            if c != late:
                last = max(last, ends[c])
            if t.source[c] >= 0 and t.source[c] != late:
                trained[t.source[c]] = ends[t.source[c]]
        length = last - barrier
        barrier = last
    return length


@njit(cache=True)
def peak_bytes(t: PlanTables, choice: NDArray[np.int64], device: Scalar) -> Scalar:
    """Return the bytes that a device needs: all resident bytes, and the largest of the calls that run on it; of a plan
    that is not complete (option -1: free) no more than of its completions."""
    resident = 0.0
    active = 0.0
    for c in range(choice.size):
        o = choice[c]
        if o >= 0 and t.first[o] <= device < t.end[o]:
            resident += t.resident[o]
            train = -1 if t.source[c] < 0 else choice[t.source[c]]
            shares = train < 0 or t.placement[train] == t.placement[o]
            active = max(active, t.active[o] + (0.0 if shares else t.copy[o]))
    return resident + active


@njit(cache=True)
def fits(t: PlanTables, choice: NDArray[np.int64]) -> bool:
    """Tell whether no device needs more than its limit for the calls that are fixed. The fullest device is the first
    one of some mesh."""
    for c in range(choice.size):  # noqa: SIM110 - the compiler takes no generators
        if choice[c] >= 0 and peak_bytes(t, choice, t.first[choice[c]]) > t.limit:
            return False
    return True


@njit(cache=True)
def unfilled(t: PlanTables, choice: NDArray[np.int64]) -> int:
    """Return the first call of a plan whose move is not filled in yet; -1 if there is none."""
    for c in range(choice.size):
        if t.source[c] >= 0 and np.isnan(move_seconds(t, choice[t.source[c]], choice[c])):
            return c
    return -1
