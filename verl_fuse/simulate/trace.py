"""Turns a simulated step into a timeline, drawn like a recorded step.

Invariants (tests/unit/simulate/test_trace.py):
- every sample has one span on its replica, two if it moved;
- every replica ends with a span that names its devices;
- `idle_share` equals the share that verl_fuse/timeline/idle.py finds on the timeline;
- stages stand on the track `step`, and every device of a task's mesh has it on its rank's track.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.generation import GenerationResult
from verl_fuse.simulate.tasks import ScheduledTask
from verl_fuse.spec.arrays import Ints
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.timeline import LANE, RANK, REPLICA, STEP, STREAM_UPDATE, Span, Timeline, union_seconds


def timeline_of(
    run: str,
    placed: Sequence[ScheduledTask],
    generation: GenerationResult,
    plan: Plan,
    lengths: DrawnLengths,
    step: int = 1,
) -> Timeline:
    """Return the timeline of a step; times count from the start of the step."""
    spans = [span for p in placed for span in _task_spans(p)]
    begin = next(p.start for p in placed if p.task.category == "generate")
    spans += _requests(generation, lengths, begin)
    spans += _freed(generation, plan, begin)
    spans += _streamed(generation, plan, begin)
    spans += _placement(generation, plan, begin)
    return Timeline(run, step, 0.0, max(p.end for p in placed), tuple(spans))


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
    finish = generation.fused.rollout.finish
    first, second, moved = _replicas_of(generation)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(generation.replicas)]
    for replica, intervals in enumerate(busy):
        until = _moves(generation, replica)
        stays = finish[(first == replica) & ~moved]
        ends = [*([stays.max()] if len(stays) else []), *([until] if moved[first == replica].any() else [])]
        intervals += [(0.0, float(end)) for end in ends]
        intervals += [
            (_moves(generation, int(first[i])), float(finish[i])) for i in np.flatnonzero(moved & (second == replica))
        ]
    for replica in _freed_replicas(generation):
        busy[replica].append((generation.fused.release, generation.end))
    for replica, start, end in _calls(generation):
        busy[replica].append((start, end))
    return busy


def _replicas_of(generation: GenerationResult) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return of each sample the replica where it begins, the replica where it ends, and whether they differ."""
    last, paused = generation.fused.rollout.replica_of, generation.paused
    home = last if paused is None else paused.replica_of
    return home, last, (last != -1) & (last != home)


def _moves(generation: GenerationResult, replica: int) -> float:
    """Return the time at which the samples of `replica` that move leave it, in seconds from the start of the
    rollout."""
    paused = generation.paused
    return 0.0 if paused is None else max(generation.fused.trigger, float(paused.clocks[replica]))


def _requests(generation: GenerationResult, lengths: DrawnLengths, begin: float) -> Iterator[Span]:
    paused = generation.paused
    first, second, moved = _replicas_of(generation)
    for i, finish in enumerate(generation.fused.rollout.finish.tolist()):
        prompt, response = int(lengths.prompt[i]), int(lengths.response[i])
        args: dict[str, str | int | float] = {"group": f"p{lengths.group[i]}"}
        start, replica = begin, int(first[i])
        if paused is not None and moved[i]:
            done = int(paused.done[i])
            until = begin + _moves(generation, replica)
            part = {"prompt_tokens": prompt, "response_tokens": done, "stop_reason": "aborted"}
            yield Span(f"request {i}", f"{REPLICA} {replica}", "generate", start, until, args | part)
            start, replica = until, int(second[i])
            prompt, response = prompt + done, response - done
            args["resumed_tokens"] = done
        args |= {"prompt_tokens": prompt, "response_tokens": response, "stop_reason": "completed"}
        yield Span(f"request {i}", f"{REPLICA} {replica}", "generate", start, begin + finish, args)


def _freed_replicas(generation: GenerationResult) -> list[int]:
    """Return the replicas whose devices run inference while others generate; beside a streamed update, inference is
    part of its calls."""
    fused = generation.fused
    if (
        generation.streamed is not None
        or generation.paused is None
        or generation.inference_end is None
        or generation.end <= fused.release
    ):
        return []
    return np.setdiff1d(np.arange(fused.rollout.replicas), fused.survivors).tolist()


def _freed(generation: GenerationResult, plan: Plan, begin: float) -> Iterator[Span]:
    """Yield the inference on freed replicas: a lane each, and the ranks that work for it."""
    start, end = begin + generation.fused.release, begin + generation.end
    for replica in _freed_replicas(generation):
        yield Span("inference", f"{LANE} slice {replica}", "inference", start, end)
        for device in _devices(plan, generation, replica):
            yield Span("inference", f"{RANK} {device}", "inference", start, end)


def _calls(generation: GenerationResult) -> list[tuple[int, float, float]]:
    """Return replica, start and end of each call of a streamed update, as far as others generate meanwhile."""
    tail = generation.streamed
    if tail is None:
        return []
    ends = np.minimum(tail.end, generation.end)
    return list(zip(tail.replica.tolist(), tail.start.tolist(), ends.tolist(), strict=True))


def _streamed(generation: GenerationResult, plan: Plan, begin: float) -> Iterator[Span]:
    """Complete groups trained on, on the ranks of released replicas."""
    for replica, start, end in _calls(generation):
        for device in _devices(plan, generation, replica):
            yield Span(STREAM_UPDATE, f"{RANK} {device}", "train", begin + start, begin + end)


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
