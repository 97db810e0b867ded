"""Replays a recorded rollout through a policy.

Invariants (tests/unit/testing/test_replay.py):
- a policy without an answer leaves the rollout as it would have been replayed;
- what the policy raises, and a wrong answer, is raised: a test sees it.

The time of each request follows from a fit to the recorded ones (verl_fuse/simulate/recorded.py), so that requests go
on in the right time where the policy moves them. `Replayed.error` tells how far the fit is from the record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.plugins import hooks
from verl_fuse.policy import Policy
from verl_fuse.simulate.decided import Setting, SliceCall, decided, prompts_of, replica_views, uid_of
from verl_fuse.simulate.recorded import begin, fit_decode, inference_of, read_recorded
from verl_fuse.simulate.rollout import RolloutState
from verl_fuse.simulate.tail import MigrationCost, unmigrated
from verl_fuse.spec.events import StepBegun
from verl_fuse.spec.step import RolloutView, Stage
from verl_fuse.spec.timeline import (
    GENERATION,
    OLD_LOG_PROB,
    REF_LOG_PROB,
    REPLICA,
    REQUEST,
    STEP,
    UPDATE_ACTOR,
    Span,
    Timeline,
)
from verl_fuse.testing.set_up import SetUpTrainer
from verl_fuse.testing.views import GRPO_STAGES
from verl_fuse.timeline.files import located, read_step, recorded_steps


@dataclass(frozen=True)
class Replayed:
    """A step replayed; seconds count from the start of the rollout.

    `views` are what the policy was shown; `moves` the moments at which it freed replicas, with the ranks that went on;
    `calls` the micro-groups that it chose for freed replicas; `used` the features that it switched on at `fuse_setup`.
    Generation takes `generation` seconds, with inference `seconds`; without the policy the two take `without` seconds.
    `error` is the share by which the replayed generation without the policy misses the recorded one.
    """

    views: tuple[RolloutView, ...]
    moves: tuple[tuple[float, tuple[int, ...]], ...]
    calls: tuple[SliceCall, ...]
    used: tuple[tuple[str, dict[str, Any]], ...]
    generation: float
    seconds: float
    without: float
    error: float


def replay(
    policy: object,
    recorded: Timeline | Path | str,
    step: int | None = None,
    *,
    block: Any = None,
    stages: Sequence[Stage] = GRPO_STAGES,
    move_seconds: float = 0.1,
) -> Replayed:
    """Replay a recorded step through a policy: a plugin's class or instance, whose configuration is `block` (by default
    what its `fuse_config` returns, with its defaults).

    `recorded` is a step, or the folder of a run (`fuse.run_dir`), of which `step` is replayed, or the last one. Freed
    replicas run inference of `stages` at the recorded pace; a moved request goes on after `move_seconds`. The policy is
    asked `fuse_predict`, `fuse_assign`, `fuse_migration` and `fuse_infer_next`, and told the events `StepBegun`,
    `Polled`, `Migrated` and `Generated`, whose times count from the start of the rollout. Prompts that it assigns
    nowhere stay where they were recorded.

    A FuseError says why a step cannot be replayed, or which answer cannot be carried out; what the policy raises is
    raised as it is.
    """
    timeline = recorded if isinstance(recorded, Timeline) else _read(recorded, step)
    hook, found = hooks(policy), read_recorded(timeline)
    timing = fit_decode(found).timing(found)
    begun = stays = begin(found, timing)
    group = np.arange(len(found.replica)) if found.group is None else found.group
    views, prompts = replica_views(begun), prompts_of(group)
    of_policy = block if block is not None else next((made() for made in hook.fuse_config()), None)
    trainer = SetUpTrainer(block=of_policy, replicas=views, streamed_stages=stages)
    hook.fuse_setup(trainer=trainer)
    hook.fuse_event(event=StepBegun(timeline.step, 0.0))
    asked = Policy(hook)
    if predictions := asked.predict(prompts):
        prompts = [replace(one, prediction=each) for one, each in zip(prompts, predictions, strict=True)]
    if homes := asked.assign(prompts, views, {}):
        replica = np.array([homes.get(uid_of(g), r) for g, r in zip(group.tolist(), found.replica, strict=True)])
        queues = [np.flatnonzero(replica == rank) for rank in range(begun.replicas)]
        begun = replace(RolloutState.begin(begun.requests, timing, queues), arrival=begun.arrival)
    inference = inference_of([found], [stays], dedicated=True)
    setting = Setting(inference, MigrationCost(move_seconds), tuple(stages), step=timeline.step)
    out = decided(begun, group, asked, setting, homes, lambda event: hook.fuse_event(event=event))
    without = unmigrated(stays.advance(), inference)
    return Replayed(
        views=out.views,
        moves=tuple((move.time, move.survivors) for move in out.moves),
        calls=out.calls,
        used=tuple(trainer.used),
        generation=out.fused.generation_end,
        seconds=out.inferred,
        without=without.seconds,
        error=abs(without.generation_end / found.generation - 1),
    )


def recorded_step(
    responses: Sequence[Sequence[int]],
    *,
    prompt: int = 32,
    samples: int = 1,
    token_seconds: float = 0.02,
    inference_seconds: float = 1.0,
    update_seconds: float = 1.0,
) -> Timeline:
    """Return a step as verl-fuse records it. Replica r generates responses of `responses[r]` tokens, all from the
    start, each token in `token_seconds`; `samples` in a row have one prompt of `prompt` tokens. Old log-probs and
    reference follow, `inference_seconds` together, and an update. A FuseError: there is no response."""
    spans = [
        Span(
            REQUEST, f"{REPLICA} {rank}", "generate", 0.0, token_seconds * tokens,
            {
                "prompt": f"r{rank}p{number // samples}", "prompt_tokens": prompt, "response_tokens": tokens,
                "stop_reason": "completed",
            },
        )
        for rank, row in enumerate(responses)
        for number, tokens in enumerate(row)
    ]  # fmt: skip
    if not spans:
        raise FuseError("responses: needs at least one response of a replica")
    now = 0.0
    lasting = (max(span.end for span in spans), inference_seconds / 2, inference_seconds / 2, update_seconds)
    for name, seconds in zip((GENERATION, OLD_LOG_PROB, REF_LOG_PROB, UPDATE_ACTOR), lasting, strict=True):
        spans.append(Span(name, STEP, "stage", now, now + seconds))
        now += seconds
    return Timeline("made", 1, 0.0, now, tuple(spans))


def _read(folder: Path | str, step: int | None) -> Timeline:
    run, page = located(Path(folder))
    return read_step(run, step or page or recorded_steps(run)[-1])
