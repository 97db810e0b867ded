"""A simulated step as a timeline, drawn like a recorded one.

Invariants (tests/unit/simulate/test_trace.py):
- every sample has one span on its replica, two if it moved;
- stages stand on the track `step`, and every device of a task's mesh has it on its rank's track.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.generation import GenerationResult
from verl_fuse.simulate.tasks import ScheduledTask
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.timeline import LANE, RANK, REPLICA, STEP, Span, Timeline


def timeline_of(
    run: str,
    placed: Sequence[ScheduledTask],
    generation: GenerationResult,
    plan: Plan,
    lengths: DrawnLengths,
    step: int = 1,
) -> Timeline:
    """Times count from the start of the step."""
    spans = [span for p in placed for span in _task_spans(p)]
    begin = next(p.start for p in placed if p.task.category == "generate")
    spans += _requests(generation, lengths, begin)
    spans += _freed(generation, plan, begin)
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


def _requests(generation: GenerationResult, lengths: DrawnLengths, begin: float) -> Iterator[Span]:
    rollout, paused = generation.fused.rollout, generation.paused
    home = rollout.replica_of if paused is None else paused.replica_of
    last = rollout.replica_of
    for i, finish in enumerate(rollout.finish.tolist()):
        prompt, response = int(lengths.prompt[i]), int(lengths.response[i])
        args: dict[str, str | int | float] = {"group": f"p{lengths.group[i]}"}
        start, replica = begin, int(home[i])
        if paused is not None and last[i] not in (-1, home[i]):
            done = int(paused.done[i])
            until = begin + max(generation.fused.trigger, float(paused.clocks[home[i]]))
            part = {"prompt_tokens": prompt, "response_tokens": done, "stop_reason": "aborted"}
            yield Span(f"request {i}", f"{REPLICA} {replica}", "generate", start, until, args | part)
            start, replica = until, int(last[i])
            prompt, response = prompt + done, response - done
            args["resumed_tokens"] = done
        args |= {"prompt_tokens": prompt, "response_tokens": response, "stop_reason": "completed"}
        yield Span(f"request {i}", f"{REPLICA} {replica}", "generate", start, begin + finish, args)


def _freed(generation: GenerationResult, plan: Plan, begin: float) -> Iterator[Span]:
    """Inference on freed replicas: a lane each, and the ranks that work for it."""
    fused = generation.fused
    end = generation.end if generation.inference_end is not None else 0.0
    if generation.paused is None or end <= fused.release:
        return
    mesh = plan.call("actor_generate").mesh
    per_replica = mesh.size // generation.replicas
    for replica in np.setdiff1d(np.arange(fused.rollout.replicas), fused.survivors).tolist():
        yield Span("inference", f"{LANE} slice {replica}", "inference", begin + fused.release, begin + end)
        for device in range(mesh.first + replica * per_replica, mesh.first + (replica + 1) * per_replica):
            yield Span("inference", f"{RANK} {device}", "inference", begin + fused.release, begin + end)
