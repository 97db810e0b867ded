"""Reads the software around the models off a recorded run: seconds of its stages, and the lengths they worked on."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import (
    GENERATION,
    OLD_LOG_PROB,
    REF_LOG_PROB,
    REQUEST,
    STEP,
    TRAIN_STAGES,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    UPDATE_WEIGHTS,
    VALUES,
    Timeline,
)

# Stage of the trainer -> where verl 0.9.1 keeps its micro-batch size per rank.
MICRO_BATCH_KEYS = {
    OLD_LOG_PROB: "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    REF_LOG_PROB: "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    VALUES: "critic.forward_micro_batch_size_per_gpu",
    UPDATE_CRITIC: "critic.ppo_micro_batch_size_per_gpu",
    UPDATE_ACTOR: "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
}


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step: seconds by stage; prompt tokens, response tokens and replica of every request."""

    stages: dict[str, float]
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    replicas: tuple[int, ...]

    @classmethod
    def of(cls, timeline: Timeline) -> "RecordedStep":
        """Make the step from a recorded timeline; requests that failed are left out."""
        requests = [
            s for s in timeline.spans if s.name == REQUEST and {"prompt_tokens", "response_tokens"} <= s.args.keys()
        ]
        if not requests:
            raise FuseError(f"step {timeline.step} of {timeline.run!r} holds no finished request")
        stages = {span.name: span.seconds for span in timeline.on(STEP)}
        timed = {name: stages[name] for name in (GENERATION, *MICRO_BATCH_KEYS, UPDATE_WEIGHTS) if name in stages}
        if GENERATION not in timed or not all(timed.values()):
            raise FuseError(
                f"step {timeline.step} of {timeline.run!r}: stages in seconds {timed}; needs gen, and none of 0 s"
            )
        tracks = sorted({span.track for span in requests})
        return cls(
            stages=stages,
            prompts=tuple(int(span.args["prompt_tokens"]) for span in requests),
            responses=tuple(max(1, int(span.args["response_tokens"])) for span in requests),
            replicas=tuple(tracks.index(span.track) for span in requests),
        )

    @property
    def lengths(self) -> np.ndarray:
        return np.add(self.prompts, self.responses)


@dataclass(frozen=True)
class RecordedRun:
    """Steps of a run on `ranks` data-parallel ranks. `micro_batch` is by stage, per rank; sequences of one
    are padded to its longest."""

    name: str
    ranks: int
    micro_batch: dict[str, int]
    minibatches: int
    steps: tuple[RecordedStep, ...]

    def microbatches(self, stage: str, step: RecordedStep) -> int:
        """Return the micro-batches per rank (and per mini-batch in training)."""
        updates = self.minibatches if stage in TRAIN_STAGES else 1
        return ceil(len(step.responses) / self.ranks / updates / self.micro_batch[stage])


def run_of(name: str, config: DictConfig, timelines: list[Timeline]) -> RecordedRun:
    """Make a run from its resolved verl configuration and its timelines. The first step warms up and is left out."""
    if len(timelines) < 2:
        raise FuseError(f"run {name!r}: {len(timelines)} recorded step; needs at least two, the first only warms up")
    if OmegaConf.select(config, "fuse.placement.critic"):
        raise FuseError(
            f"run {name!r}: fuse.placement.critic is set; the floors of a run need a critic on all ranks: null"
        )
    steps = tuple(RecordedStep.of(timeline) for timeline in timelines[1:])
    sizes = {stage: key for stage, key in MICRO_BATCH_KEYS.items() if any(stage in step.stages for step in steps)}
    prompts, mini = (
        _count(config, key) for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    )
    return RecordedRun(
        name,
        _count(config, "trainer.nnodes") * _count(config, "trainer.n_gpus_per_node"),
        {stage: _count(config, key) for stage, key in sizes.items()},
        max(1, prompts // mini),
        steps,
    )


def _count(config: DictConfig, key: str) -> int:
    value = OmegaConf.select(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FuseError(f"{key}={value!r}; the floors of a run need a fixed whole number")
    return value
