"""Refuses a schedule that could not run.

Invariants (tests/unit/schedule/test_validate.py): every op once on its stage's rank, for its duration; no overlap on a
rank; inputs there in time, transfer included; micro-batches of a pipeline in order per stage and kind; memory limit
kept; the reported numbers are true.
"""

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.timing import rank_peaks
from verl_fuse.spec.schedule import Op, Schedule


def validate(schedule: Schedule) -> None:
    """Raise a FuseError that prints the rank's row with the fault marked."""
    table = OpTable(schedule.problem)
    slack = 1e-6 * max(1.0, schedule.makespan)
    starts = _starts(schedule, table)
    ends = starts + table.duration
    arrival = np.where(table.before >= 0, ends[table.before] + table.delay, 0.0)
    _refuse(schedule, table, starts < arrival - slack, "starts before its input has arrived")
    follows = table.microbatch > 0
    previous = np.where(follows, np.arange(len(table)) - 1, 0)
    _refuse(
        schedule,
        table,
        follows & (starts < ends[previous] - slack),
        "starts before the micro-batch ahead of it has ended",
    )
    orders = []
    for ids in table.on_rank:
        order = ids[np.lexsort((ends[ids], starts[ids]))]
        late = np.zeros(len(table), dtype=bool)
        late[order[1:]] = starts[order[1:]] < ends[order[:-1]] - slack
        _refuse(schedule, table, late, "overlaps the op before it")
        orders.append(order.tolist())
    peak, limit = float(rank_peaks(table, orders).max()), schedule.problem.memory_limit
    if limit is not None and peak > limit * (1 + 1e-9):
        raise FuseError(f"schedule: peak memory {peak:g} is over memory_limit={limit:g}")
    for name, said, true in (
        ("makespan", schedule.makespan, float(ends.max())),
        ("peak_memory", schedule.peak_memory, peak),
    ):
        if abs(said - true) > slack:
            raise FuseError(f"schedule: {name}={said:g}, but its ops give {true:g}")


def _starts(schedule: Schedule, table: OpTable) -> np.ndarray:
    starts = np.full(len(table), np.nan)
    for op in schedule.ops:
        pipeline = schedule.problem.pipelines[op.pipeline]
        if op.rank not in pipeline.ranks or op.microbatch >= pipeline.microbatches:
            raise FuseError(_marked(schedule, op, "is not part of the problem"))
        i = table.id(op.pipeline, pipeline.ranks.index(op.rank), int(op.kind == "B"), op.microbatch)
        if not np.isnan(starts[i]):
            raise FuseError(_marked(schedule, op, "appears twice"))
        if abs(op.end - op.start - table.duration[i]) > 1e-6 * max(1.0, schedule.makespan):
            raise FuseError(_marked(schedule, op, f"takes {op.end - op.start:g}, its stage says {table.duration[i]:g}"))
        starts[i] = op.start
    if np.isnan(starts).any():
        i = int(np.flatnonzero(np.isnan(starts))[0])
        token = f"{table.pipeline[i]}{'FB'[table.kind[i]]}{table.microbatch[i]}"
        raise FuseError(f"schedule: op {token} on rank {table.rank[i]} is missing")
    return starts


def _refuse(schedule: Schedule, table: OpTable, wrong: np.ndarray, fault: str) -> None:
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        key = (table.rank[i], table.pipeline[i], "FB"[table.kind[i]], table.microbatch[i])
        op = next(op for op in schedule.ops if (op.rank, op.pipeline, op.kind, op.microbatch) == key)
        raise FuseError(_marked(schedule, op, fault))


def _marked(schedule: Schedule, op: Op, fault: str) -> str:
    row = " ".join(f">{other.token}<" if other == op else other.token for other in schedule.rows[op.rank])
    return f"schedule: op {op.token} on rank {op.rank} at {op.start:g} {fault}\n  rank {op.rank}: {row}"
