"""Greedy list scheduling: always run the op that can start first.

Invariants (tests/unit/schedule/test_invariants.py): the memory limit is kept; a start that would strand a rank for memory is never the last resort,
because back-to-back 1F1B is among the candidates.

Source: the start of the annealing in RLHFuse (arXiv 2409.13221), generalised to any number of pipelines, and repeated with several limits on the
micro-batches in flight: fewer in flight means less memory and often also a shorter schedule.
"""

from verl_fuse.schedule.back_to_back import back_to_back
from verl_fuse.schedule.bounds import tails, window
from verl_fuse.schedule.solution import Budget, Solution, fits, from_orders
from verl_fuse.schedule.table import OpTable

EXTRA_IN_FLIGHT = (None, 2, 1, 0)
"""Micro-batches a stage may hold beyond 1F1B's stages - s; None: no limit of its own."""


def greedy(table: OpTable, budget: Budget) -> Solution:
    """Best of list scheduling under a few in-flight limits; falls back to back-to-back 1F1B when all of them strand for memory."""
    candidates = [back_to_back(table, budget)]
    for extra in EXTRA_IN_FLIGHT:
        orders = list_schedule(table, in_flight(table, extra))
        solution = from_orders(table, orders) if orders is not None else None
        if solution is not None and fits(table, solution):
            candidates.append(solution)
    return min(candidates, key=lambda s: s.key)


def in_flight(table: OpTable, extra: int | None) -> list[list[int]]:
    """Limit of micro-batches in flight for each pipeline and stage."""
    limits = []
    for i, p in enumerate(table.problem.pipelines):
        own = [p.microbatches if extra is None else p.stages - s + extra for s in range(p.stages)]
        limits.append([min(own[s], window(table, i, s)) for s in range(p.stages)])
    return limits


def list_schedule(table: OpTable, limits: list[list[int]]) -> list[list[int]] | None:
    """Orders from smallest start first, ties to backward, then to the longest remaining path; None when every rank is stuck for memory.

    An op of a pipeline is passed over when running it would delay the earliest runnable op of a deeper pipeline on the same rank.
    """
    problem, tail = table.problem, tails(table).tolist()
    duration, delay, activation, before = (
        table.duration.tolist(),
        table.delay.tolist(),
        table.activation.tolist(),
        table.before.tolist(),
    )
    depth = [p.stages for p in problem.pipelines]
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(problem.ranks)]
    for i, p in enumerate(problem.pipelines):
        for s, rank in enumerate(p.ranks):
            lanes[rank].append((i, s))
    upcoming = {(i, s, kind): 0 for i, p in enumerate(problem.pipelines) for s in range(p.stages) for kind in (0, 1)}
    ends: dict[int, float] = {}
    free, held = [0.0] * problem.ranks, [0.0] * problem.ranks
    limit = float("inf") if problem.memory_limit is None else problem.memory_limit * (1 + 1e-9)
    orders: list[list[int]] = [[] for _ in range(problem.ranks)]

    def candidate(r: int) -> tuple[float, int, float, int, int, int, int] | None:
        runnable = []
        for i, s in lanes[r]:
            for kind in (1, 0):
                m = upcoming[i, s, kind]
                if m == problem.pipelines[i].microbatches:
                    continue
                op = table.id(i, s, kind, m)
                if before[op] >= 0 and before[op] not in ends:
                    continue
                if kind == 0 and (m - upcoming[i, s, 1] >= limits[i][s] or held[r] + activation[op] > limit):
                    continue
                start = max(free[r], ends[before[op]] + delay[op]) if before[op] >= 0 else free[r]
                runnable.append((start, -kind, -tail[op], op, i, s, kind))
        if not runnable:
            return None
        deepest = max(depth[entry[4]] for entry in runnable)
        first_deep = min(entry[0] for entry in runnable if depth[entry[4]] == deepest)
        return min(e for e in runnable if depth[e[4]] == deepest or e[0] + duration[e[3]] <= first_deep)

    ready = [candidate(r) for r in range(problem.ranks)]
    for _ in range(len(table)):
        chosen = min((c for c in ready if c is not None), default=None)
        if chosen is None:
            return None
        start, _, _, op, i, s, kind = chosen
        r = problem.pipelines[i].ranks[s]
        orders[r].append(op)
        ends[op] = free[r] = start + duration[op]
        upcoming[i, s, kind] += 1
        held[r] += -activation[op] if kind else activation[op]
        touched = {r}
        p = problem.pipelines[i]
        if kind == 0 and s + 1 < p.stages:
            touched.add(p.ranks[s + 1])
        if kind == 1 and s > 0:
            touched.add(p.ranks[s - 1])
        for t in touched:
            ready[t] = candidate(t)
    return orders
