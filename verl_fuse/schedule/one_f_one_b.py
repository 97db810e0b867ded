"""Builds 1F1B: warm up, then alternate one forward with one backward, then drain.

Invariants (tests/unit/schedule/test_one_f_one_b.py):
- every (stage, micro-batch) has exactly one F and, later, one B;
- stage s holds at most stages - s micro-batches in flight, and never more than the memory limit allows.
"""

from verl_fuse.schedule.bounds import window
from verl_fuse.schedule.table import OpTable


def stage_orders(table: OpTable, pipeline: int) -> list[list[int]]:
    """Return the 1F1B order of op ids for each stage of one pipeline.

    A stage that may hold fewer micro-batches than the next would starve it forever, so the limit of a stage
    also binds all later stages.
    """
    p = table.problem.pipelines[pipeline]
    in_flight = p.microbatches
    rows = []
    for s in range(p.stages):
        in_flight = min(in_flight, p.stages - s, window(table, pipeline, s))
        forwards = [table.id(pipeline, s, 0, m) for m in range(p.microbatches)]
        backwards = [table.id(pipeline, s, 1, m) for m in range(p.microbatches)]
        row = forwards[: in_flight - 1]
        for m in range(in_flight - 1, p.microbatches):
            row += [forwards[m], backwards[m - in_flight + 1]]
        rows.append(row + backwards[p.microbatches - in_flight + 1 :])
    return rows


def waves(table: OpTable) -> list[list[int]]:
    """Return the pipelines that run side by side: neighbours in the problem with the same model and no common rank."""
    groups: list[list[int]] = []
    for i, p in enumerate(table.problem.pipelines):
        pipelines = table.problem.pipelines
        if (
            groups
            and pipelines[groups[-1][0]].model == p.model
            and not any(set(pipelines[j].ranks) & set(p.ranks) for j in groups[-1])
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def rank_orders(table: OpTable, pipelines: list[int]) -> list[list[int]]:
    """Return the 1F1B orders of `pipelines`, one after the other on ranks they share."""
    orders: list[list[int]] = [[] for _ in range(table.problem.ranks)]
    for i in pipelines:
        for rank, row in zip(table.problem.pipelines[i].ranks, stage_orders(table, i), strict=True):
            orders[rank] += row
    return orders
