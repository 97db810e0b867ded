"""Reads off a recorded run what its calls worked on: the seconds of its stages, the lengths, how verl cut them into
micro-batches, and what features left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_fuse.cost.model import Batch
from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    MODEL,
    ROLLOUT,
    Get,
    getter,
    has_critic,
    on_accelerators,
    recomputes,
    sequence_ranks,
)
from verl_fuse.spec.micro_batches import MICRO_BATCHES
from verl_fuse.spec.timeline import (
    GENERATION,
    INFERENCE_STAGES,
    LANE,
    OLD_LOG_PROB,
    REF_LOG_PROB,
    REQUEST,
    SLICE,
    STEP,
    STREAM_UPDATE,
    TRAIN_STAGES,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    UPDATE_WEIGHTS,
    VALUES,
    Timeline,
)

# The floors of a run are those of data-parallel calls over the batch once: keys of Megatron that are 1 then.
_ONE_OF_MEGATRON = tuple(f"megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
_STAGES = (GENERATION, *INFERENCE_STAGES, *TRAIN_STAGES, UPDATE_WEIGHTS)
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step: seconds by stage; prompt tokens, response tokens and replica of every request. `computed` is the
    part of a stage's tokens that it computed, where a feature left some out. A pass of the rollout verified `drafted`
    tokens a sequence and brought it `tokens_per_pass`."""

    stages: dict[str, float]
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    replicas: tuple[int, ...]
    computed: Mapping[str, float] = field(default_factory=dict)
    tokens_per_pass: float = 1.0
    drafted: float = 0.0

    @classmethod
    def of(cls, timeline: Timeline, metrics: Mapping[str, float] = _NOTHING) -> "RecordedStep":
        """Make the step from a recorded timeline and verl's metrics of it. Requests that failed are left out, and
        stages whose work was done elsewhere in part: inference on slices, groups trained in the tail, samples that
        moved."""
        requests = [
            s for s in timeline.spans if s.name == REQUEST and {"prompt_tokens", "response_tokens"} <= s.args.keys()
        ]
        if not requests:
            raise FuseError(f"step {timeline.step} of {timeline.run!r} holds no finished request")
        stages = {span.name: span.seconds for span in timeline.on(STEP)}
        timed = {name: stages[name] for name in _STAGES if name in stages}
        if GENERATION not in timed or not all(timed.values()):
            raise FuseError(
                f"step {timeline.step} of {timeline.run!r}: stages in seconds {timed}; needs gen, and none of 0 s"
            )
        if any("resumed_tokens" in span.args for span in requests):
            del stages[GENERATION]
        sliced = any(
            span.track.startswith(f"{LANE} {SLICE}") and span.category == "inference" for span in timeline.spans
        )
        streamed = any(span.name == STREAM_UPDATE for span in timeline.spans)
        for stage in (*(INFERENCE_STAGES if sliced else ()), *((UPDATE_ACTOR,) if streamed else ())):
            stages.pop(stage, None)
        tracks = sorted({span.track for span in requests})
        step = cls(
            stages=stages,
            prompts=tuple(int(span.args["prompt_tokens"]) for span in requests),
            responses=tuple(max(1, int(span.args["response_tokens"])) for span in requests),
            replicas=tuple(tracks.index(span.track) for span in requests),
        )
        return step.with_features({span.name: span.args for span in timeline.on(STEP)}, metrics)

    @classmethod
    def logged(cls, metrics: Mapping[str, float], samples: int, replicas: int) -> "RecordedStep":
        """Make the step from verl's metrics alone. Its lengths are those of a lognormal distribution with the logged
        mean, whose longest of `samples` has the logged maximum; they come in an order like chance, and are dealt out to
        the replicas in turn."""
        lengths = {}
        for name in ("prompt", "response"):
            mean, most = (metrics.get(f"{name}_length/{fact}", 0.0) for fact in ("mean", "max"))
            if not 0 < mean <= most:
                raise FuseError(
                    f"{name}_length/mean={mean:g}, {name}_length/max={most:g}; needs lengths as verl logs them"
                )
            drawn = _lengths(samples, mean, most)
            lengths[name] = tuple(map(int, np.random.default_rng(samples).permutation(drawn)))
        seconds = {stage: metrics.get(f"timing_s/{stage}", 0.0) for stage in _STAGES}
        return cls(
            {stage: taken for stage, taken in seconds.items() if taken > 0},
            lengths["prompt"],
            lengths["response"],
            tuple(i % replicas for i in range(samples)),
        )

    def with_features(self, said: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, float]) -> "RecordedStep":
        """Return the step with what features left out, by the spans' arguments of its stages and by its metrics."""

        def left(stage: str, name: str) -> float:
            return float(said.get(stage, {}).get(name, 0.0))

        prompts = sum(self.prompts) / self.lengths.sum()
        own = left(UPDATE_ACTOR, "own_log_probs")
        names = {
            OLD_LOG_PROB: "old_log_prob",
            REF_LOG_PROB: "ref",
            VALUES: "values",
            UPDATE_ACTOR: "update",
            UPDATE_CRITIC: "update_critic",
        }
        shared = {stage: prompts * metrics.get(f"fuse/{name}_shared_tokens", 0.0) for stage, name in names.items()}
        parts = {
            OLD_LOG_PROB: 1 - own,
            REF_LOG_PROB: 1.0,
            UPDATE_ACTOR: 1 - left(UPDATE_ACTOR, "skipped_tokens"),
            VALUES: 1 - left(UPDATE_CRITIC, "own_values"),
            UPDATE_CRITIC: 1.0,
        }
        computed = {stage: part * (1 - shared.get(stage, 0.0)) for stage, part in parts.items()}
        drafted = metrics.get("fuse/speculation_drafted_tokens", 0.0)
        passes = metrics["fuse/speculation_tokens_per_pass"] if drafted else 1.0
        return replace(
            self,
            # What computes nothing says nothing of its floors.
            stages={stage: seconds for stage, seconds in self.stages.items() if computed.get(stage, 1.0) > 0},
            computed={stage: part for stage, part in computed.items() if 0 < part < 1},
            tokens_per_pass=passes,
            drafted=drafted * passes / sum(self.responses),
        )

    @property
    def lengths(self) -> np.ndarray:
        return np.add(self.prompts, self.responses)

    @property
    def passes(self) -> np.ndarray:
        """Return the passes of the rollout that each response took."""
        return np.ceil(np.array(self.responses) / self.tokens_per_pass).astype(np.int64)


def _lengths(count: int, mean: float, most: float) -> np.ndarray:
    """Return the quantiles of a lognormal distribution with that mean, of which the largest is `most`."""
    if count == 1 or most <= mean:
        return np.full(count, round(mean))
    scores = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    # mean = exp(mu + sigma ** 2 / 2) and most = exp(mu + sigma * score): the smaller root; where the maximum is beyond
    # any such distribution, the one whose maximum is the largest.
    root = scores[-1] ** 2 - 2 * log(most / mean)
    sigma = scores[-1] - np.sqrt(max(root, 0.0))
    lengths = np.minimum(np.exp(log(mean) - sigma**2 / 2 + sigma * scores), most)
    return np.maximum(1, np.rint(lengths))


@dataclass(frozen=True)
class RecordedRun:
    """Steps of a run on `ranks` data-parallel ranks. By stage and rank, a micro-batch has `micro_batch` sequences or up
    to `budget` tokens; it is `packed`, or padded to its longest sequence. `recompute`: gradient checkpointing. A
    replica of the rollout has `tp` devices and runs `most` requests at once (None: all). `masked`: a packed micro-batch
    is computed as one sequence with a mask, as verl does on a CPU."""

    name: str
    ranks: int
    micro_batch: dict[str, int]
    minibatches: int
    steps: tuple[RecordedStep, ...]
    budget: dict[str, int] = field(default_factory=dict)
    packed: bool = False
    recompute: bool = False
    tp: int = 1
    most: int | None = None
    masked: bool = False

    def microbatches(self, stage: str, step: RecordedStep) -> int:
        """Return the micro-batches per rank (and per mini-batch in training)."""
        share = self._share(stage, step)
        if stage in self.budget:
            return ceil(float(step.lengths.sum()) * share / self.budget[stage])
        return ceil(len(step.responses) * share / self.micro_batch[stage])

    def _share(self, stage: str, step: RecordedStep) -> float:
        """Return the share of a step that a rank computes (of each mini-batch in training)."""
        return step.computed.get(stage, 1.0) / self.ranks / (self.minibatches if stage in TRAIN_STAGES else 1)

    def batch(self, stage: str, step: RecordedStep) -> Batch:
        """Return what the stage computed, padding included."""
        part, size = step.computed.get(stage, 1.0), self.micro_batch.get(stage)
        if size is None:
            size = ceil(len(step.responses) * self._share(stage, step) / self.microbatches(stage, step))
        whole = Batch.of(step.lengths) if self.packed else Batch.padded(step.lengths, size)
        computed = Batch(part * whole.sequences, part * whole.tokens, part * whole.squares)
        if not (self.packed and self.masked):
            return computed
        return computed.masked(self.microbatches(stage, step) * part / self._share(stage, step))


def run_of(
    name: str,
    config: DictConfig,
    timelines: Sequence[Timeline],
    metrics: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> RecordedRun:
    """Make a run from its resolved verl configuration, its timelines, and verl's metrics by step; without a timeline
    from the metrics of the steps alone. The first step warms up and is left out."""
    timed = {timeline.step: timeline for timeline in timelines}
    logged = timed or {step: values for step, values in metrics.items() if values.get("timing_s/step", 0.0) > 0}
    if len(logged) < 2:
        raise FuseError(f"run {name!r}: {len(logged)} recorded step; needs at least two, the first only warms up")
    for key in ("fuse.placement.critic", "fuse.pipeline.enabled"):
        if value := OmegaConf.select(config, key):
            raise FuseError(
                f"run {name!r}: {key}={value}; the floors of a run need actor and critic on all ranks, one after the "
                "other: take a run without it"
            )
    get = getter(config)
    roles = (ACTOR, CRITIC) if has_critic(get) else (ACTOR,)
    for role in roles:
        own = (
            "ppo_epochs",
            "ulysses_sequence_parallel_size",
            *(_ONE_OF_MEGATRON if get(f"{role}.strategy") == "megatron" else ()),
        )
        ones = {f"{role}.{each}": OmegaConf.select(config, f"{role}.{each}", default=1) for each in own}
        for key, value in {**ones, f"ranks that share a sequence of {role}": sequence_ranks(get, role) or 1}.items():
            if value != 1:
                raise FuseError(
                    f"run {name!r}: {key}={value}; the floors of a run need 1, a data-parallel call over the batch once"
                )
    if len({get(f"{role}.ppo_mini_batch_size") for role in roles}) > 1:
        raise FuseError(f"run {name!r}: {CRITIC}.ppo_mini_batch_size: the floors of a run need the actor's")
    prompts, mini, tp, samples = (
        _count(config, key)
        for key in (
            "data.train_batch_size",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.n",
        )
    )
    ranks = _count(config, "trainer.nnodes") * _count(config, "trainer.n_gpus_per_node")
    measured = sorted(logged)[1:]
    if timed:
        steps = tuple(RecordedStep.of(timed[step], metrics.get(step, {})) for step in measured)
    else:
        steps = tuple(RecordedStep.logged(metrics[step], prompts * samples, max(1, ranks // tp)) for step in measured)
    sizes, budgets = {}, {}
    for stage, keys in MICRO_BATCHES.items():
        if not any(stage in step.stages for step in steps):
            continue
        if not keys.by_tokens or OmegaConf.select(config, keys.by_tokens):
            budgets[stage] = _count(config, keys.tokens, keys.default)
        else:
            sizes[stage] = _count(config, keys.rows)
    return RecordedRun(
        name,
        ranks,
        sizes,
        max(1, prompts // mini),
        steps,
        budgets,
        bool(OmegaConf.select(config, f"{MODEL}.use_remove_padding")),
        recomputes(get),
        tp,
        requests_at_once(get),
        masked=not on_accelerators(get),
    )


def requests_at_once(get: Get) -> int | None:
    """Return the requests that a replica runs at once, of which each of its data-parallel engines runs
    `max_num_seqs`; None where there is no limit."""
    most = get(f"{ROLLOUT}.max_num_seqs")
    return most and most * (get(f"{ROLLOUT}.data_parallel_size") or 1)


def _count(config: DictConfig, key: str, default: int | None = None) -> int:
    value = OmegaConf.select(config, key, default=default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FuseError(f"{key}={value!r}; the floors of a run need a fixed whole number")
    return value
