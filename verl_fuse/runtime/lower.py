"""Lowers a schedule to a program: the orders of forwards and backwards, with a receive before and a send after each
where its stage has a neighbour.

Invariants (tests/unit/runtime/test_lower.py):
- a receive comes right before the op that needs it, a send right after the op that made it;
- a forward receives from the stage before and sends to the stage after, a backward the other way round;
  within a rank no message is sent.
"""

from collections.abc import Iterator, Sequence

from verl_fuse.errors import FuseError
from verl_fuse.runtime.program import Instruction, PipelineProgram
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import OpKind, Schedule

OpOrders = Sequence[Sequence[tuple[int, OpKind, int]]]
"""(pipeline, kind, micro-batch) of each rank in running order, as `verl_fuse.spec.schedule.parse_text` returns them."""


def lower_schedule(schedule: Schedule) -> PipelineProgram:
    """Return the program of a solved schedule."""
    return lower(schedule.problem, [[(op.pipeline, op.kind, op.microbatch) for op in row] for row in schedule.rows])


def lower(problem: ScheduleProblem, orders: OpOrders) -> PipelineProgram:
    """Return the program of running orders; a FuseError names an op whose pipeline or stage is not on its rank."""
    rows = []
    for rank, order in enumerate(orders):
        row: list[Instruction] = []
        for pipeline, kind, microbatch in order:
            if pipeline >= len(problem.pipelines) or rank not in problem.pipelines[pipeline].ranks:
                raise FuseError(f"op {pipeline}{kind}{microbatch} on rank {rank}: the problem has no such stage there")
            row += _instructions(problem.pipelines[pipeline], pipeline, kind, microbatch, rank)
        rows.append(tuple(row))
    return PipelineProgram(problem, tuple(rows))


def neighbours(ranks: Sequence[int], stage: int, kind: OpKind) -> tuple[int | None, int | None]:
    """Return, of a pipeline's ranks in stage order, those that a forward or backward of `stage` receives from and sends
    to; None at the ends of the pipeline."""
    before = ranks[stage - 1] if stage else None
    after = ranks[stage + 1] if stage + 1 < len(ranks) else None
    return (before, after) if kind == "F" else (after, before)


def _instructions(pipeline: Pipeline, index: int, kind: OpKind, microbatch: int, rank: int) -> Iterator[Instruction]:
    source, target = neighbours(pipeline.ranks, pipeline.ranks.index(rank), kind)
    if source is not None:
        yield Instruction("receive", index, kind, microbatch, source)
    yield Instruction("run", index, kind, microbatch)
    if target is not None:
        yield Instruction("send", index, kind, microbatch, target)
