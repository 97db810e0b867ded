"""Turns a simulated step into a timeline, drawn like a recorded step.

Invariants (tests/unit/simulate/test_trace.py):
- every sample has one span on its replica, and one more for each move;
- every replica ends with a span that names its devices;
- `idle_share` equals the share that verl_fuse/timeline/idle.py finds on the timeline;
- stages stand on the track `step`, and every device of a task's mesh has it on its rank's track.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.generation import GenerationResult
from verl_fuse.simulate.tasks import ScheduledTask
from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.timeline import LANE, RANK, REPLICA, STEP, STREAM_UPDATE, Category, Span, Timeline, union_seconds


def timeline_of(
    run: str,
    placed: Sequence[ScheduledTask],
    generation: GenerationResult,
    plan: Plan,
    lengths: DrawnLengths,
) -> Timeline:
    """Return the timeline of a step, the first; times count from the start of the step."""
    spans = [span for p in placed for span in _task_spans(p)]
    begin = next(p.start for p in placed if p.task.category == "generate")
    spans += _requests(generation, lengths, begin)
    spans += _on_freed(generation, plan, begin)
    spans += _placement(generation, plan, begin)
    return Timeline(run, 1, 0.0, max(p.end for p in placed), tuple(spans))


def _task_spans(placed: ScheduledTask) -> Iterator[Span]:
    task, start, end = placed.task, placed.start, placed.end
    if end == start:
        return
    yield Span(task.stage, STEP, "sync" if task.category == "sync" else "stage", start, end)
    if task.category == "generate":
        return
    yield Span(task.stage, f"{LANE} train", task.category, start, end)
    for device in sorted({device for mesh in task.meshes for device in range(mesh.first, mesh.end)}):
        yield Span(task.stage, f"{RANK} {device}", task.category, start, end)


def idle_share(placed: Sequence[ScheduledTask], generation: GenerationResult, plan: Plan) -> float:
    """Return the idle share of all devices that `verl_fuse.timeline.idle` finds on `timeline_of` the same step, without
    a span for every sample."""
    work = sum(p.task.device_seconds for p in placed if p.task.category != "generate")
    mesh = plan.call("actor_generate").mesh
    work += sum(map(union_seconds, _busy_replicas(generation))) * mesh.size / generation.replicas
    return max(0.0, 1 - work / (plan.devices * max(p.end for p in placed)))


def _busy_replicas(generation: GenerationResult) -> list[list[tuple[float, float]]]:
    """Return the stretches in which each replica's devices generate or, freed, run inference; seconds from the start of
    the rollout."""
    busy: list[list[tuple[float, float]]] = [[] for _ in range(generation.replicas)]
    for part in _parts(generation):
        for replica in np.unique(part.replica).tolist():
            here = part.replica == replica
            first = here & (part.start == 0)
            if first.any():
                busy[replica].append((0.0, float(part.end[first].max())))
            later = here & (part.start > 0)
            busy[replica] += zip(part.start[later].tolist(), part.end[later].tolist(), strict=True)
    for _, _, replica, start, end in _meanwhile(generation):
        busy[replica].append((start, end))
    return busy


@dataclass(frozen=True, eq=False)
class _Part:
    """What samples (`rows`) generate on a replica until they move, or finish, in seconds from the start of the rollout.
    `done` and `until` are their response tokens at its start and its end; None: all of the response."""

    rows: Ints
    replica: Ints
    start: Floats
    end: Floats
    done: Ints
    until: Ints | None = None


def _parts(generation: GenerationResult) -> Iterator[_Part]:
    rollout, moves = generation.fused.rollout, generation.moves
    count = len(rollout.finish)
    at = (moves[0].paused if moves else rollout).replica_of
    start, done = np.zeros(count), np.zeros(count, np.int64)
    for number, move in enumerate(moves):
        # -1: it had finished before.
        after = (moves[number + 1].paused if number + 1 < len(moves) else rollout).replica_of
        rows = np.flatnonzero((after != -1) & (after != at))
        # A request may move again before it has arrived.
        moment = np.maximum(start[rows], np.maximum(move.time, move.paused.clocks[at[rows]]))
        yield _Part(rows, at[rows], start[rows], moment, done[rows], move.paused.done[rows])
        at[rows], start[rows], done[rows] = after[rows], moment, move.paused.done[rows]
    yield _Part(np.arange(count), at, start, rollout.finish, done)


def _requests(generation: GenerationResult, lengths: DrawnLengths, begin: float) -> Iterator[Span]:
    for part in _parts(generation):
        until = lengths.response if part.until is None else part.until
        columns = (part.rows, part.replica, part.start, part.end, part.done, until)
        for i, replica, start, end, done, tokens in zip(*(column.tolist() for column in columns), strict=True):
            args: dict[str, str | int | float] = {
                "group": f"p{lengths.group[i]}",
                "prompt_tokens": int(lengths.prompt[i]) + done,
                "response_tokens": tokens - done,
                "stop_reason": "completed" if part.until is None else "aborted",
                **({"resumed_tokens": done} if start else {}),
            }
            yield Span(f"request {i}", f"{REPLICA} {replica}", "generate", begin + start, begin + end, args)


def _meanwhile(generation: GenerationResult) -> list[tuple[str, Category, int, float, float]]:
    """Return what the devices of freed replicas do while others generate, as name, category, replica, start and end:
    the calls of a streamed update, of which inference is a part, micro-groups that a policy chose, or else
    inference."""
    fused, tail, end = generation.fused, generation.streamed, generation.end
    if tail is not None:
        calls = zip(tail.replica.tolist(), tail.start.tolist(), np.minimum(tail.end, end).tolist(), strict=True)
        return [(STREAM_UPDATE, "train", *call) for call in calls]
    if generation.slices is not None:
        begun = [one for one in generation.slices if one.start < end]
        return [("micro-group", "inference", one.replica, one.start, min(one.end, end)) for one in begun]
    if not generation.moves or generation.inference_end is None or end <= fused.release:
        return []
    freed = np.setdiff1d(np.arange(fused.rollout.replicas), fused.survivors).tolist()
    return [("inference", "inference", replica, fused.release, end) for replica in freed]


def _on_freed(generation: GenerationResult, plan: Plan, begin: float) -> Iterator[Span]:
    """Yield the work on freed replicas: a lane each where it is inference, and the ranks that work for it."""
    for name, category, replica, start, end in _meanwhile(generation):
        if category == "inference":
            yield Span(name, f"{LANE} slice {replica}", category, begin + start, begin + end)
        for device in _devices(plan, generation, replica):
            yield Span(name, f"{RANK} {device}", category, begin + start, begin + end)


def _placement(generation: GenerationResult, plan: Plan, begin: float) -> Iterator[Span]:
    """Yield the end of each replica's work, with its devices: a replica without a sample has a track too."""
    busy = _busy_replicas(generation)
    for replica, intervals in enumerate(busy):
        devices = _devices(plan, generation, replica)
        done = max((end for _, end in intervals), default=0.0)
        args = {"first_device": devices.start, "devices": len(devices)}
        yield Span("done", f"{REPLICA} {replica}", "wait", begin + done, begin + max(done, generation.end), args)


def _devices(plan: Plan, generation: GenerationResult, replica: int) -> range:
    mesh = plan.call("actor_generate").mesh
    size = mesh.size // generation.replicas
    return range(mesh.first + replica * size, mesh.first + (replica + 1) * size)
