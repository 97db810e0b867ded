"""Refuses a program that could not run, or that would not compute the results of serial training.

Invariants (tests/unit/runtime/test_check.py) of a program that passes:
- every rank has exactly the forwards and backwards of its stages, each between its receive and its send;
- on every rank the micro-batches of a pipeline come in order, per kind: messages carry no tags, and gradients
  add up in the serial order;
- when a receive blocks until its message is sent and a send never blocks, every rank reaches its end;
- activations, held from the start of a forward to the end of its backward, stay within the memory limit.
"""

from collections import Counter

from verl_fuse.errors import FuseError
from verl_fuse.runtime.lower import lower
from verl_fuse.runtime.program import Instruction, PipelineProgram
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import OpKind


def check(program: PipelineProgram) -> None:
    """Raise a FuseError that prints the grid with the fault marked in brackets."""
    if len(program.rows) != program.problem.ranks:
        raise FuseError(f"program: {len(program.rows)} rows; its problem has {program.problem.ranks} ranks")
    for rank in range(program.problem.ranks):
        _check_runs(program, rank)
        _check_messages(program, rank)
    _check_progress(program)
    limit = program.problem.memory_limit
    for rank, peak in enumerate(predicted_peaks(program)):
        if limit is not None and peak > limit * (1 + 1e-9):
            raise FuseError(f"program: rank {rank} holds activations of {peak:g}; memory_limit={limit:g}")


def predicted_peaks(program: PipelineProgram) -> tuple[float, ...]:
    """Return the largest sum of activations that each rank holds at a time, in the problem's memory unit."""
    peaks = []
    for rank, row in enumerate(program.rows):
        held = peak = 0.0
        for step in row:
            if step.action == "run":
                pipeline = program.problem.pipelines[step.pipeline]
                size = pipeline.activation[pipeline.ranks.index(rank)]
                held += size if step.kind == "F" else -size
                peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _check_runs(program: PipelineProgram, rank: int) -> None:
    """Raise a FuseError unless each op of the rank comes once, in order per pipeline and kind, backwards after their
    forwards."""
    problem, done = program.problem, Counter[tuple[int, OpKind]]()
    for position, step in enumerate(program.rows[rank]):
        if not _exists(problem, rank, step):
            raise _fault(program, rank, position, "is not part of the problem")
        if step.action != "run":
            continue
        wanted = done[step.pipeline, step.kind]
        if step.microbatch != wanted:
            raise _fault(program, rank, position, f"comes where {step.pipeline}{step.kind}{wanted} is due")
        if step.kind == "B" and step.microbatch >= done[step.pipeline, "F"]:
            raise _fault(program, rank, position, "comes before its forward")
        done[step.pipeline, step.kind] += 1
    for index, pipeline in enumerate(problem.pipelines):
        for kind in ("F", "B"):
            if rank in pipeline.ranks and done[index, kind] < pipeline.microbatches:
                missing = f"{index}{kind}{done[index, kind]}"
                raise _fault(program, rank, len(program.rows[rank]), f"of rank {rank}: {missing} is missing")


def _exists(problem: ScheduleProblem, rank: int, step: Instruction) -> bool:
    if step.pipeline >= len(problem.pipelines):
        return False
    pipeline = problem.pipelines[step.pipeline]
    return rank in pipeline.ranks and step.microbatch < pipeline.microbatches


def _check_messages(program: PipelineProgram, rank: int) -> None:
    """Raise a FuseError unless receives and sends are the ones that the runs need, at their places."""
    row = program.rows[rank]
    runs: list[tuple[int, OpKind, int]] = [
        (step.pipeline, step.kind, step.microbatch) for step in row if step.action == "run"
    ]
    orders: list[list[tuple[int, OpKind, int]]] = [runs if r == rank else [] for r in range(program.problem.ranks)]
    wanted = lower(program.problem, orders).rows[rank]
    for position, (step, due) in enumerate(zip(row, wanted, strict=False)):
        if step != due:
            raise _fault(program, rank, position, f"comes where {due.token} is due")
    if len(row) != len(wanted):
        position = min(len(row), len(wanted))
        due = wanted[position].token if position < len(wanted) else "the end"
        raise _fault(program, rank, position, f"comes where {due} is due")


def _check_progress(program: PipelineProgram) -> None:
    """Run the program under its blocking semantics; name the ring of ranks that wait for each other."""
    sent: set[tuple[int, str]] = set()
    position = [0] * program.problem.ranks
    waiting: dict[tuple[int, str], int] = {}
    runnable = list(range(program.problem.ranks))
    while runnable:
        rank = runnable.pop()
        row = program.rows[rank]
        while position[rank] < len(row):
            step = row[position[rank]]
            if step.action == "receive" and (rank, step.op) not in sent:
                waiting[rank, step.op] = rank
                break
            if step.action == "send":
                assert step.peer is not None
                sent.add((step.peer, step.op))
                if (blocked := waiting.pop((step.peer, step.op), None)) is not None:
                    runnable.append(blocked)
            position[rank] += 1
    stuck = {rank: at for rank, at in enumerate(position) if at < len(program.rows[rank])}
    if stuck:
        raise FuseError(f"program deadlocks: {_ring(program, stuck)}\n{program.grid(stuck)}")


def _ring(program: PipelineProgram, stuck: dict[int, int]) -> str:
    """Return text on the ranks that wait for each other, starting anywhere on the ring; every stuck rank waits for a
    stuck rank."""
    rank, path = min(stuck), []
    while rank not in path:
        path.append(rank)
        peer = program.rows[rank][stuck[rank]].peer
        assert peer is not None
        rank = peer
    ring = path[path.index(rank) :]
    return ", ".join(f"rank {r} waits at {program.rows[r][stuck[r]].token}" for r in ring)


def _fault(program: PipelineProgram, rank: int, position: int, what: str) -> FuseError:
    row = program.rows[rank]
    place = f"{row[position].token} on rank {rank}" if position < len(row) else "the end"
    return FuseError(f"program: {place} {what}\n{program.grid({rank: position})}")
