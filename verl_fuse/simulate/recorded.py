"""A recorded step, replayed: how fast its replicas decoded, and what each feature would have changed.

Invariants (tests/unit/simulate/test_recorded.py):
- a timeline made by the simulator is replayed to the seconds it had;
- savings are never negative: what would not have helped is left as it was.

A replica's decode time is fitted to the recorded requests: the seconds of a request are a start-up, and per token a
step and a share for every sequence that ran at the time; two requests that started together share as many steps as the
shorter one has tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from verl_fuse.cost.drafter import FIGURES
from verl_fuse.errors import FuseError
from verl_fuse.simulate.drafts import with_drafts
from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.elastic import best_assignment, run_elastic
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.simulate.streamed import NO_INFERENCE, StreamedUpdate, streamed_tail
from verl_fuse.simulate.tail import InferenceWork, MigrationCost, migrated, trigger_time, unmigrated
from verl_fuse.simulate.threshold import Threshold, ThresholdScan, search
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.timeline import (
    ADVANTAGE,
    DEFER_CRITIC,
    FUSED_UPDATE,
    GENERATION,
    INFERENCE_STAGES,
    OLD_LOG_PROB,
    REF_LOG_PROB,
    REPLICA,
    REWARD,
    STEP,
    STREAM_UPDATE,
    TRAIN_STAGES,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    VALUES,
    ZERO_GRADIENT_TOKENS,
    Timeline,
)
from verl_fuse.timeline.tracks import number, role, totals

SCORE_STAGES = (REWARD, *INFERENCE_STAGES)


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """One step. Per request: replica, lengths in tokens, start and end in seconds from the first start. `stages` in
    seconds."""

    step: int
    seconds: float
    stages: dict[str, float]
    replica: Ints
    prompt: Ints
    response: Ints
    start: Floats
    end: Floats
    # Share of its tokens that have no gradient, where the run says it; whether its updates left them out, or the passes
    # for old log-probs and values.
    zero_gradient: float | None = None
    skipped: bool = False
    own_log_probs: bool = False
    own_values: bool = False
    # A number for each prompt; whether groups were trained on while others generated.
    group: Ints | None = None
    streamed: bool = False

    @property
    def replicas(self) -> int:
        return int(self.replica.max()) + 1

    @property
    def generation(self) -> float:
        """Return the seconds from the first request's start to the last one's end."""
        return float(self.end.max())

    def total(self, stages: Sequence[str]) -> float:
        return sum(self.stages.get(stage, 0.0) for stage in stages)


def read_recorded(timeline: Timeline) -> ReplayedStep:
    """Read the requests and stages of a recorded step; a FuseError names missing facts."""
    spans = [s for s in timeline.spans if s.category == "generate" and role(s.track) == REPLICA]
    if any("resumed_tokens" in span.args for span in spans):
        raise FuseError(
            f"{timeline.run}, step {timeline.step}: samples migrated already; needs a run without migration"
        )
    if not spans or any(number(s.track) is None or "response_tokens" not in s.args for s in spans):
        raise FuseError(
            f"{timeline.run}, step {timeline.step}: {len(spans)} requests on replicas with token counts; needs a step "
            "recorded by verl-fuse with trainer.v1.trainer_mode=fuse"
        )
    begin, last = min(span.start for span in spans), max(span.end for span in spans)
    if begin == last:
        raise FuseError(
            f"{timeline.run}, step {timeline.step}: all its requests took 0 s; needs requests that took time"
        )

    def column(value) -> np.ndarray:
        return np.array([value(span) for span in spans])

    def tokens(name: str) -> Ints:
        return column(lambda span: int(span.args.get(name, 0))).astype(np.int64)

    said = {span.name: span.args for span in timeline.on(STEP)}
    update, share = said.get(UPDATE_ACTOR, {}), said.get(ADVANTAGE, {}).get(ZERO_GRADIENT_TOKENS)
    return ReplayedStep(
        step=timeline.step,
        zero_gradient=None if share is None else float(share),
        skipped=bool(update.get("skipped_tokens")),
        own_log_probs=bool(update.get("own_log_probs")),
        own_values=bool(said.get(UPDATE_CRITIC, {}).get("own_values")),
        seconds=timeline.end - timeline.start,
        stages=totals((span.name, span.seconds) for span in timeline.on(STEP)),
        replica=column(lambda span: number(span.track)).astype(np.int64),
        prompt=tokens("prompt_tokens"),
        response=np.maximum(tokens("response_tokens"), 1),
        start=column(lambda span: span.start - begin),
        end=column(lambda span: span.end - begin),
        group=_groups([str(span.args.get("prompt", span.args.get("group", ""))) for span in spans]),
        streamed=any(span.name == STREAM_UPDATE for span in timeline.spans),
    )


def _groups(names: Sequence[str]) -> Ints | None:
    """Return a number for each name; None where there is a request without one."""
    return np.unique(names, return_inverse=True)[1] if all(names) else None


@dataclass(frozen=True)
class DecodeFit:
    """Seconds of a request: `startup + tokens * (step + per_sequence * sequences running on its replica)`."""

    startup: float
    step: float
    per_sequence: float

    def timing(
        self, recorded: ReplayedStep, acceptance: float | None = None, accelerator: bool = False
    ) -> ReplicaTiming:
        """Return the timing as tables, with drafts of that acceptance, on an accelerator or not; the start-up is the
        prefill's, memory was no limit."""

        def decode(sequences: Floats, tokens: Floats) -> Floats:
            return floor + self.step + self.per_sequence * sequences

        most = len(recorded.replica)
        longest = int((recorded.prompt + recorded.response).max())
        floor = 1e-9
        return ReplicaTiming.build(
            decode if acceptance is None else with_drafts(decode, acceptance, accelerator),
            # The prefill gives the first token.
            lambda sequences, tokens: floor + self.startup + self.step,
            max_batch=most,
            kv_capacity=most * longest + most + 1,
            longest=longest,
            prefill_budget=most * longest,
        )


def fit_decode(recorded: ReplayedStep) -> DecodeFit:
    """Fit least squares with no negative coefficient, over all requests of a step: a machine is not equally fast in all
    steps."""
    rows, seconds = [], []
    for replica in range(recorded.replicas):
        here = recorded.replica == replica
        start, end, tokens = recorded.start[here], recorded.end[here], recorded.response[here]
        together = np.maximum(np.minimum.outer(end, end) - np.maximum.outer(start, start), 0.0)
        shorter = np.minimum.outer(end - start, end - start)
        # A request of no length shares no steps.
        together = np.divide(together, shorter, out=np.zeros_like(together), where=shorter > 0)
        shared = (together * np.minimum.outer(tokens, tokens)).sum(axis=1)
        rows.append(np.stack([np.ones(len(tokens)), tokens, shared], axis=1))
        seconds.append(end - start)
    table, target = np.concatenate(rows), np.concatenate(seconds)
    best, least = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = np.linalg.lstsq(table[:, chosen], target, rcond=None)[0]
            error = float(((table[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return DecodeFit(*map(float, best))


@dataclass(frozen=True)
class Saving:
    """The saving of a feature: seconds and device-seconds a step, out of `seconds` it had. `note`: how, or why
    nothing."""

    feature: str
    seconds: float
    device_share: float
    note: str


@dataclass(frozen=True)
class Replay:
    """Means over the recorded steps. `replay_error`: median of |replayed / recorded - 1| of their generation."""

    steps: int
    seconds: float
    stages: dict[str, float]
    replay_error: float
    threshold: Threshold
    savings: tuple[Saving, ...]


def replay(
    steps: Sequence[ReplayedStep], options: SimulationOptions, drafted: bool = False, accelerator: bool = False
) -> Replay:
    """Return the saving of every feature, for steps that had as many samples and replicas each (others are left out);
    `drafted` tells that fuse.speculation was on, `accelerator` that the devices were no CPUs."""
    sizes = [(len(step.replica), step.replicas) for step in steps]
    usual = max(set(sizes), key=sizes.count)
    steps = [step for step, size in zip(steps, sizes, strict=True) if size == usual]
    timings = [fit_decode(step).timing(step) for step in steps]
    begun = [_begin(step, timing) for step, timing in zip(steps, timings, strict=True)]
    through = [rollout.advance() for rollout in begun]
    errors = [abs(end.seconds / step.generation - 1) for step, end in zip(steps, through, strict=True)]
    inference = _inference(steps, through, options.dedicated is not False)
    moving = MigrationCost(options.migration_latency)
    threshold = search(ThresholdScan(begun, inference, moving))
    seconds = float(np.mean([step.seconds for step in steps]))
    stages = {name: float(np.mean([step.total([name]) for step in steps])) for name in steps[0].stages}
    savings = (
        _observe(steps, options.stock_poll),
        _interstage(begun, through, inference, moving, threshold),
        _pipeline(stages),
        _speculation(steps, through, options.acceptance, drafted, accelerator),
        _zero_gradient(steps),
        _old_log_prob(steps, stages),
        _values(steps, stages),
        _stream(steps, through, options.dedicated is not False),
        _elastic(steps, timings, seconds, options),
    )
    return Replay(len(steps), seconds, stages, float(np.median(errors)), threshold, savings)


def _begin(step: ReplayedStep, timing: ReplicaTiming) -> RolloutState:
    queues = [np.flatnonzero(step.replica == replica) for replica in range(step.replicas)]
    rollout = RolloutState.begin(Requests.of(step.prompt, step.response), timing, queues)
    rollout.arrival[:] = step.start
    return rollout


def _inference(steps: Sequence[ReplayedStep], through: Sequence[RolloutState], dedicated: bool) -> InferenceWork:
    seconds = sum(step.total(SCORE_STAGES) for step in steps)
    tokens = sum(int(rollout.requests.tokens.sum()) for rollout in through)
    return InferenceWork(steps[0].replicas * seconds / tokens, dedicated=dedicated)


def _observe(steps: Sequence[ReplayedStep], poll: float) -> Saving:
    lost = [
        np.ceil(step.total([GENERATION]) / poll) * poll - step.total([GENERATION]) if poll else 0.0 for step in steps
    ]
    return Saving(
        "observe", float(np.mean(lost)), 0.0, f"saved already: stock verl looks at the rollout every {poll:g} s"
    )


def _interstage(
    begun: Sequence[RolloutState],
    through: Sequence[RolloutState],
    inference: InferenceWork,
    moving: MigrationCost,
    threshold: Threshold,
) -> Saving:
    if not threshold.threshold:
        shared = "devices are shared and saturated" if not inference.dedicated else "no threshold is predicted to gain"
        return Saving("interstage", 0.0, 0.0, f"R_t = 0: {shared}")
    saved = []
    for rollout, end in zip(begun, through, strict=True):
        time = trigger_time(end, threshold.threshold)
        fused = migrated(rollout.advance(time), time, threshold.survivors, inference, moving)
        saved.append(unmigrated(end, inference).seconds - fused.seconds)
    share = threshold.threshold / len(begun[0].requests)
    note = f"R_t = {share:.0%} of the batch, {threshold.survivors} of {begun[0].replicas} replicas kept"
    return Saving("interstage", max(0.0, float(np.mean(saved))), 0.0, note)


def _pipeline(stages: dict[str, float]) -> Saving:
    if stages.get(FUSED_UPDATE):
        return Saving("pipeline", 0.0, 0.0, "it was on: critic and actor trained as one")
    critic, actor = (stages.get(name, 0.0) for name in TRAIN_STAGES)
    if not critic:
        return Saving("pipeline", 0.0, 0.0, "no critic was trained")
    return Saving(
        "pipeline", 0.0, 0.0,
        f"nothing without pipeline parallelism, whose bubbles it fills; with it at most {min(critic, actor):.2f} s, "
        "`simulate` with a plan says",
    )  # fmt: skip


def _speculation(
    steps: Sequence[ReplayedStep],
    through: Sequence[RolloutState],
    acceptance: float | None,
    drafted: bool,
    accelerator: bool,
) -> Saving:
    measured = f"; {FIGURES}" if accelerator else ""
    if drafted:
        note = "it was on: the replay decodes as fast as the run did with drafts"
        return Saving("speculation", 0.0, 0.0, note + measured)
    if acceptance is None:
        note = "no acceptance is known: --set acceptance=SHARE assumes one"
        return Saving("speculation", 0.0, 0.0, note + measured)
    faster = [_begin(step, fit_decode(step).timing(step, acceptance, accelerator)).advance() for step in steps]
    saved = [before.seconds - after.seconds for before, after in zip(through, faster, strict=True)]
    note = f"if {acceptance:.0%} of the drafted tokens are accepted once those before them were"
    return Saving("speculation", max(0.0, float(np.mean(saved))), 0.0, note + measured)


def _zero_gradient(steps: Sequence[ReplayedStep]) -> Saving:
    if any(step.skipped for step in steps):
        return Saving("zero_gradient", 0.0, 0.0, "it was on: samples without a gradient were left out")
    if any(step.zero_gradient is None for step in steps):
        return Saving("zero_gradient", 0.0, 0.0, "the run does not say how many samples have no gradient")
    shares = [step.zero_gradient or 0.0 for step in steps]
    saved = [share * step.total([UPDATE_ACTOR]) for share, step in zip(shares, steps, strict=True)]
    note = f"{np.mean(shares):.0%} of the tokens had no gradient"
    return Saving("zero_gradient", float(np.mean(saved)), 0.0, note)


def _old_log_prob(steps: Sequence[ReplayedStep], stages: Mapping[str, float]) -> Saving:
    if any(step.own_log_probs for step in steps):
        return Saving("old_log_prob", 0.0, 0.0, "it was on: the update computed its own")
    note = "with one mini-batch a step the update computes the same"
    return Saving("old_log_prob", stages.get(OLD_LOG_PROB, 0.0), 0.0, note)


def _values(steps: Sequence[ReplayedStep], stages: Mapping[str, float]) -> Saving:
    if any(step.own_values for step in steps):
        return Saving("values", 0.0, 0.0, "it was on: the critic's update computed its own")
    if stages.get(FUSED_UPDATE) or stages.get(DEFER_CRITIC):
        return Saving("values", 0.0, 0.0, "not beside a fused update, or a critic with devices of its own")
    if not stages.get(UPDATE_CRITIC):
        return Saving("values", 0.0, 0.0, "no critic was trained")
    note = "with one mini-batch a step the critic's update computes the same"
    return Saving("values", stages.get(VALUES, 0.0), 0.0, note)


def _stream(steps: Sequence[ReplayedStep], through: Sequence[RolloutState], dedicated: bool) -> Saving:
    """Return the saving of a streamed update: replicas that are done are released, and the update in copies takes as
    long as the recorded one."""
    if any(step.streamed for step in steps):
        return Saving("stream", 0.0, 0.0, "it was on: groups were trained on while others generated")
    if any(step.total([UPDATE_CRITIC]) for step in steps):
        return Saving("stream", 0.0, 0.0, "an advantage needs the whole batch: nothing is streamed with a critic")
    if any(step.total([REF_LOG_PROB]) for step in steps):
        return Saving("stream", 0.0, 0.0, "a group is trained on after its reference log-probs: with interstage")
    if not dedicated:
        return Saving("stream", 0.0, 0.0, "devices are shared and saturated: a replica that is done leaves none free")
    tails = []
    for step, rollout in zip(steps, through, strict=True):
        if step.group is None:
            return Saving("stream", 0.0, 0.0, "the run does not say which samples are of one prompt")
        work = step.replicas * step.total([UPDATE_ACTOR]) / int(rollout.requests.tokens.sum())
        tails.append(streamed_tail(unmigrated(rollout, NO_INFERENCE), step.group, StreamedUpdate(work)))
    saved = [
        rollout.seconds + step.total([UPDATE_ACTOR]) - tail.seconds
        for step, rollout, tail in zip(steps, through, tails, strict=True)
    ]
    share = float(np.mean([tail.share for tail in tails]))
    note = (
        f"{share:.0%} of the update before generation ends, if copies of the actor on each replica "
        "(fsdp_config.fsdp_size: its devices) train as fast"
    )
    return Saving("stream", max(0.0, float(np.mean(saved))), 0.0, note)


def _elastic(
    steps: Sequence[ReplayedStep], timings: Sequence[ReplicaTiming], seconds: float, options: SimulationOptions
) -> Saving:
    """Return the saving of elastic replicas with lengths known in advance: no prediction can do better."""
    if options.dedicated is False:
        return Saving("elastic", 0.0, 0.0, "devices are shared and saturated: a replica that stops leaves none free")
    faster, held = [], []
    for step, timing in zip(steps, timings, strict=True):
        group = np.arange(len(step.replica))
        lengths = DrawnLengths(group, step.prompt, step.response, step.response)
        run = run_elastic(lengths, timing, best_assignment(lengths, timing, step.replicas, options), options)
        base = _begin(step, timing).advance().seconds
        faster.append(base - run.seconds)
        held.append(float(run.ends.sum()) / step.replicas - base)
    share, gained = -float(np.mean(held)) / seconds, float(np.mean(faster))
    note = "device time given back if every length had been known" + (f"; {-gained:.2f} s longer" if gained < 0 else "")
    return Saving("elastic", max(0.0, gained), max(0.0, share), note)
