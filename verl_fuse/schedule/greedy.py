"""Does greedy list scheduling: on the rank that can start first, it runs the op with the longest path left.

Invariants (tests/unit/schedule/test_invariants.py): the memory limit is kept, and the result is never
worse than back-to-back 1F1B.

The op is chosen among the ops that could start before another would be finished (Giffler and Thompson's active
schedules, 1960). Memory is kept by limits on the micro-batches in flight per pipeline and stage; several limits are
tried, as fewer in flight means less memory and often also a shorter schedule.
"""

from verl_fuse.schedule.back_to_back import back_to_back
from verl_fuse.schedule.bounds import tails
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE, Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable

EXTRA_IN_FLIGHT = (None, 4, 2, 1, 0)
"""Micro-batches a stage may hold beyond 1F1B's stages - s; None: no limit but memory."""


def greedy(table: OpTable, budget: Budget) -> Solution:
    """Return the best candidate under the memory limit."""
    limit = table.problem.memory_limit
    return candidates(table, float("inf") if limit is None else limit)[0]


def candidates(table: OpTable, capacity: float) -> list[Solution]:
    """Return schedules that hold at most `capacity` on every rank, best first."""
    found = [back_to_back(table)]
    for extra in EXTRA_IN_FLIGHT:
        orders = list_schedule(table, in_flight(table, extra, capacity), capacity)
        solution = from_orders(table, orders) if orders is not None else None
        if solution is not None:
            found.append(solution)
    return sorted((s for s in found if s.peak <= capacity * (1 + MAKESPAN_TOLERANCE)), key=lambda s: s.key)


def in_flight(table: OpTable, extra: int | None, capacity: float) -> list[list[int]]:
    """Return the limit of micro-batches in flight for each pipeline and stage.

    With `extra`, the limits of a rank together fit `capacity` where that leaves every pipeline one: then no
    rank can starve another.
    """
    pipelines = table.problem.pipelines
    if extra is None:
        return [[p.microbatches] * p.stages for p in pipelines]
    limits = [[min(p.microbatches, p.stages - s + extra) for s in range(p.stages)] for p in pipelines]
    for rank in range(table.problem.ranks):
        here = [(i, p.ranks.index(rank)) for i, p in enumerate(pipelines) if rank in p.ranks]
        wanted = {stage: limits[stage[0]][stage[1]] for stage in here}
        while sum(limits[i][s] * pipelines[i].activation[s] for i, s in here) > capacity:
            shrinkable = [(i, s) for i, s in here if limits[i][s] > 1]
            if not shrinkable:
                break
            i, s = max(shrinkable, key=lambda stage: limits[stage[0]][stage[1]] / wanted[stage])
            limits[i][s] -= 1
    return limits


def list_schedule(table: OpTable, limits: list[list[int]], capacity: float) -> list[list[int]] | None:
    """Return running orders; None when every rank is stuck for memory."""
    problem, tail = table.problem, (tails(table) + table.duration).tolist()
    duration, delay, activation, before = (
        table.duration.tolist(),
        table.delay.tolist(),
        table.activation.tolist(),
        table.before.tolist(),
    )
    stages: list[list[tuple[int, int]]] = [[] for _ in range(problem.ranks)]
    for i, p in enumerate(problem.pipelines):
        for s, rank in enumerate(p.ranks):
            stages[rank].append((i, s))
    done = {(i, s, kind): 0 for i, p in enumerate(problem.pipelines) for s in range(p.stages) for kind in (0, 1)}
    ends: dict[int, float] = {}
    free, held = [0.0] * problem.ranks, [0.0] * problem.ranks
    orders: list[list[int]] = [[] for _ in range(problem.ranks)]

    def choose(rank: int) -> tuple[float, int, int, int, int] | None:
        """Return (start, op, pipeline, stage, kind) of the rank's next op."""
        runnable = []
        for i, s in stages[rank]:
            for kind in (1, 0):
                m = done[i, s, kind]
                if m == problem.pipelines[i].microbatches:
                    continue
                op = table.id(i, s, kind, m)
                if before[op] >= 0 and before[op] not in ends:
                    continue
                if kind == 0 and (
                    m - done[i, s, 1] >= limits[i][s]
                    or held[rank] + activation[op] > capacity * (1 + MAKESPAN_TOLERANCE)
                ):
                    continue
                start = max(free[rank], ends[before[op]] + delay[op]) if before[op] >= 0 else free[rank]
                runnable.append((start, op, i, s, kind))
        if not runnable:
            return None
        soonest = min(start + duration[op] for start, op, *_ in runnable)
        return min((entry for entry in runnable if entry[0] < soonest), key=lambda entry: (-tail[entry[1]], entry))

    ready = [choose(rank) for rank in range(problem.ranks)]
    for _ in range(len(table)):
        chosen = min((entry for entry in ready if entry is not None), default=None)
        if chosen is None:
            return None
        start, op, i, s, kind = chosen
        p = problem.pipelines[i]
        rank = p.ranks[s]
        orders[rank].append(op)
        ends[op] = free[rank] = start + duration[op]
        done[i, s, kind] += 1
        held[rank] += -activation[op] if kind else activation[op]
        neighbour = s - 1 if kind else s + 1
        for touched in {rank, p.ranks[neighbour] if 0 <= neighbour < p.stages else rank}:
            ready[touched] = choose(touched)
    return orders
