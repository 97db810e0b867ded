"""Computes lower bounds that hold for any placement, cost, transfer delay and memory limit.

Invariants (tests/unit/schedule/test_bounds.py): no schedule is faster than `makespan_bound`, and none that ends by a
deadline needs less memory than `memory_bound` of that deadline; both agree with brute force where the instance is tiny,
and with the published bound on the 12 instances.
"""

import heapq
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.timing import rounded

Limits = Mapping[tuple[int, int], int]
"""Micro-batches that each (pipeline, stage) may have in flight."""


def heads(table: OpTable, limits: Limits | None = None) -> NDArray[np.float64]:
    """Return the earliest start of every op: longest path along the pipeline, the FIFO order and the limits
    (default: see `windows`)."""
    result, limits = np.zeros(len(table)), windows(table) if limits is None else limits
    for i, p in enumerate(table.problem.pipelines):
        forward, backward = list(range(p.stages)), list(reversed(range(p.stages)))
        for m in range(p.microbatches):
            for kind, stages in ((0, forward), (1, backward)):
                for s in stages:
                    op = table.id(i, s, kind, m)
                    source = table.before[op]
                    earliest = result[source] + table.duration[source] + table.delay[op] if source >= 0 else 0.0
                    if m:
                        earliest = max(earliest, result[op - 1] + table.duration[op - 1])
                    held = limits[i, s]
                    if kind == 0 and m >= held:
                        freeing = table.id(i, s, 1, m - held)
                        earliest = max(earliest, result[freeing] + table.duration[freeing])
                    result[op] = earliest
    return result


def tails(table: OpTable, limits: Limits | None = None) -> NDArray[np.float64]:
    """Return the least time between the end of every op and the end of the schedule."""
    result, limits = np.zeros(len(table)), windows(table) if limits is None else limits
    for i, p in enumerate(table.problem.pipelines):
        for m in reversed(range(p.microbatches)):
            for kind, stages in ((1, range(p.stages)), (0, reversed(range(p.stages)))):
                for s in stages:
                    op = table.id(i, s, kind, m)
                    if m + 1 < p.microbatches:
                        _push(result, table, op, op + 1, 0.0)
                    held = limits[i, s]
                    if kind == 1 and m + held < p.microbatches:
                        _push(result, table, op, table.id(i, s, 0, m + held), 0.0)
                    source = table.before[op]
                    if source >= 0:
                        result[source] = max(result[source], table.delay[op] + table.duration[op] + result[op])
    return result


def _push(result: NDArray[np.float64], table: OpTable, op: int, later: int, delay: float) -> None:
    result[op] = max(result[op], delay + table.duration[later] + result[later])


def windows(table: OpTable) -> Limits:
    """Return the limits that `window` allows everywhere."""
    pipelines = table.problem.pipelines
    return {(i, s): window(table, i, s) for i, p in enumerate(pipelines) for s in range(p.stages)}


def window(table: OpTable, pipeline: int, stage: int) -> int:
    """Return the most micro-batches of a pipeline that may be in flight on a stage under the memory limit."""
    p, limit = table.problem.pipelines[pipeline], table.problem.memory_limit
    if limit is None or p.activation[stage] == 0:
        return p.microbatches
    return max(1, min(p.microbatches, int(limit / p.activation[stage] + 1e-9)))


def makespan_bound(table: OpTable, limits: Limits | None = None) -> float:
    """Return the largest one-machine bound over ranks, within the limits, which the memory limit implies by default:
    Jackson's preemptive schedule of the rank's ops between their heads and tails.

    Source: Carlier, "The one-machine sequencing problem" (1982). It dominates the four published
    bounds of the fused problem.
    """
    head, tail = heads(table, limits), tails(table, limits)
    return rounded(max(_preemptive(head[ids], table.duration[ids], tail[ids]) for ids in table.on_rank if len(ids)))


def _preemptive(head: NDArray[np.float64], duration: NDArray[np.float64], tail: NDArray[np.float64]) -> float:
    by_release = np.argsort(head, kind="stable").tolist()
    left = duration.tolist()
    ready: list[tuple[float, int]] = []
    now, best, upcoming = 0.0, 0.0, 0
    while upcoming < len(by_release) or ready:
        if not ready:
            now = max(now, float(head[by_release[upcoming]]))
        while upcoming < len(by_release) and head[by_release[upcoming]] <= now:
            heapq.heappush(ready, (-float(tail[by_release[upcoming]]), by_release[upcoming]))
            upcoming += 1
        negative_tail, op = ready[0]
        until = float(head[by_release[upcoming]]) if upcoming < len(by_release) else float("inf")
        run = min(left[op], until - now)
        now += run
        left[op] -= run
        if left[op] <= 1e-12 * duration[op]:
            heapq.heappop(ready)
            best = max(best, now - negative_tail)
    return best


def memory_bound(table: OpTable, deadline: float) -> float:
    """Return the least peak activation memory of any schedule that ends by `deadline`.

    The largest of three: one micro-batch alone; activations every such schedule holds at one moment, because the
    forward must have started and the backward cannot have ended; and Little's law (activation x least residence,
    over the time the rank has).
    """
    head, tail = heads(table), tails(table)
    best = table.problem.least_memory_limit
    for ids in table.on_rank:
        forwards = ids[table.kind[ids] == 0]
        if not len(forwards):
            continue
        sizes = np.array([table.problem.pipelines[p].microbatches for p in table.pipeline[forwards]])
        backwards = forwards + sizes
        latest = deadline - tail[forwards] - table.duration[forwards]
        released = head[backwards] + table.duration[backwards]
        noise = 1e-7 * deadline  # times are sums of floats
        best = max(best, _overlap(latest + noise, released - noise, table.activation[forwards]))
        residence = np.array([_residence(table, int(op)) for op in forwards])
        room = deadline - float(tail[ids].min()) - float(head[ids].min())
        best = max(best, float((residence * table.activation[forwards]).sum()) / room - 1e-9) if room > 0 else best
    return best


def _residence(table: OpTable, forward: int) -> float:
    """Return the shortest time from the start of a forward to the end of its backward on the same rank."""
    p, s = table.problem.pipelines[table.pipeline[forward]], int(table.stage[forward])
    return sum(p.forward[s:]) + sum(p.backward[s:]) + 2 * table.problem.transfer * (p.stages - 1 - s)


def _overlap(begin: NDArray[np.float64], end: NDArray[np.float64], amount: NDArray[np.float64]) -> float:
    """Return the largest total amount of intervals [begin, end) that cover one moment."""
    kept = begin < end
    times = np.concatenate([begin[kept], end[kept]])
    change = np.concatenate([amount[kept], -amount[kept]])
    held = np.cumsum(change[np.lexsort((change, times))])
    return rounded(float(held.max(initial=0.0)))
