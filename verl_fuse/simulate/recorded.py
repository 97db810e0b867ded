"""A recorded step, replayed: how fast its replicas decoded, and what each feature would have changed.

Invariants (tests/unit/simulate/test_recorded.py):
- a timeline made by the simulator is replayed to the seconds it had;
- savings are never negative, except of seconds where device time is given back: what would not have helped is left as
it was.

A replica's decode time is fitted to the recorded requests: the seconds of a request are a start-up, and per token a
step and a share for every sequence that ran at the time; two requests that started together share as many steps as the
shorter one has tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from verl_fuse.cost.drafter import added_seconds
from verl_fuse.errors import FuseError
from verl_fuse.simulate.drafts import with_drafts
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.simulate.saving import SCORE_STAGES, Saving
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.simulate.threshold import Threshold, ThresholdScan, search
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints, nonnegative_fit
from verl_fuse.spec.timeline import (
    ADVANTAGE,
    GENERATION,
    REPLICA,
    STEP,
    STREAM_UPDATE,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    ZERO_GRADIENT_TOKENS,
    Timeline,
)
from verl_fuse.timeline.tracks import number, role, totals


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

        def verify(sequences: Floats, drafted: int, tokens: Floats) -> Floats:
            verified = sequences * (1 + drafted)
            added = added_seconds(sequences, verified, sequential=False) if accelerator else 0.0
            return decode(verified, tokens) + added

        most = len(recorded.replica)
        longest = int((recorded.prompt + recorded.response).max())
        floor = 1e-9
        return ReplicaTiming.build(
            decode if acceptance is None else with_drafts(verify, acceptance),
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
    return DecodeFit(*map(float, nonnegative_fit(table, target)))


@dataclass(frozen=True)
class Recording:
    """A recorded run, replayed. By step: the step, its decode times, and its rollout before and after generation.
    `seconds` and `stages` are means over the steps; `on` are the features that the run is known to have had on,
    `accelerator` tells that the devices were no CPUs; `mini_batches` of a step, by model: 1 where none are named."""

    steps: Sequence[ReplayedStep]
    timings: Sequence[ReplicaTiming]
    begun: Sequence[RolloutState]
    through: Sequence[RolloutState]
    seconds: float
    stages: Mapping[str, float]
    inference: InferenceWork
    moving: MigrationCost
    threshold: Threshold
    options: SimulationOptions
    on: Collection[str]
    accelerator: bool
    mini_batches: Mapping[str, int]

    @property
    def dedicated(self) -> bool:
        """Tell whether replicas have devices of their own."""
        return self.options.dedicated is not False

    def after(self, saving: Saving) -> "Recording":
        """Return the run as it would have been with a feature on."""

        def left(stages: Mapping[str, float]) -> dict[str, float]:
            return {name: seconds * (1 - saving.stages.get(name, 0.0)) for name, seconds in stages.items()}

        steps = [replace(step, stages=left(step.stages)) for step in self.steps]
        inference = inference_of(steps, self.through, self.dedicated)
        return replace(
            self,
            steps=steps,
            stages=left(self.stages),
            inference=inference,
            threshold=search(ThresholdScan(self.begun, inference, self.moving)),
        )


@dataclass(frozen=True)
class Replay:
    """Means over the recorded steps. `replay_error`: median of |replayed / recorded - 1| of their generation;
    `observed` is the saving of observe mode, `savings` those of features by name; `beside` returns the latter once the
    features that it is given are on, in this order. `recorded` are the steps themselves."""

    steps: int
    seconds: float
    stages: Mapping[str, float]
    replay_error: float
    observed: Saving
    savings: Mapping[str, Saving]
    beside: Callable[[Sequence[str]], Mapping[str, Saving]]
    recorded: Sequence[ReplayedStep] = ()

    @property
    def described(self) -> str:
        """Tell which steps these are; a run's first one, which warms up, is hardly ever among them."""
        numbers = [step.step for step in self.recorded]
        if len(numbers) < 2:
            return f"step {numbers[0]}" if numbers else f"{self.steps} steps"
        return f"mean of {len(numbers)} steps ({min(numbers)} to {max(numbers)})"


def replay(
    steps: Sequence[ReplayedStep],
    options: SimulationOptions,
    savings: Mapping[str, Callable[[Recording], Saving]],
    on: Collection[str] = (),
    accelerator: bool = False,
    mini_batches: Mapping[str, int] = MappingProxyType({}),
) -> Replay:
    """Return the saving of every feature of `savings`, for steps that had as many samples and replicas each (others are
    left out)."""
    sizes = [(len(step.replica), step.replicas) for step in steps]
    usual = max(set(sizes), key=sizes.count)
    steps = [step for step, size in zip(steps, sizes, strict=True) if size == usual]
    timings = [fit_decode(step).timing(step) for step in steps]
    begun = [begin(step, timing) for step, timing in zip(steps, timings, strict=True)]
    through = [rollout.advance() for rollout in begun]
    errors = [abs(end.seconds / step.generation - 1) for step, end in zip(steps, through, strict=True)]
    inference = inference_of(steps, through, options.dedicated is not False)
    moving = MigrationCost(options.migration_latency)
    recording = Recording(
        steps=steps,
        timings=timings,
        begun=begun,
        through=through,
        seconds=float(np.mean([step.seconds for step in steps])),
        stages={name: float(np.mean([step.total([name]) for step in steps])) for name in steps[0].stages},
        inference=inference,
        moving=moving,
        threshold=search(ThresholdScan(begun, inference, moving)),
        options=options,
        on=on,
        accelerator=accelerator,
        mini_batches=mini_batches,
    )

    def beside(on: Sequence[str]) -> Mapping[str, Saving]:
        run = recording
        for name in on:
            run = run.after(savings[name](run))
        return {name: saving(run) for name, saving in savings.items()}

    return Replay(
        len(steps),
        recording.seconds,
        recording.stages,
        float(np.median(errors)),
        _observed(steps, options.stock_poll),
        beside(()),
        beside,
        steps,
    )


def begin(step: ReplayedStep, timing: ReplicaTiming) -> RolloutState:
    """Return the rollout of a recorded step before it generates."""
    queues = [np.flatnonzero(step.replica == replica) for replica in range(step.replicas)]
    rollout = RolloutState.begin(Requests.of(step.prompt, step.response), timing, queues)
    rollout.arrival[:] = step.start
    return rollout


def inference_of(steps: Sequence[ReplayedStep], through: Sequence[RolloutState], dedicated: bool) -> InferenceWork:
    """Return the inference of these steps, per token as it took on all replicas after generation."""
    seconds = sum(step.total(SCORE_STAGES) for step in steps)
    tokens = sum(int(rollout.requests.tokens.sum()) for rollout in through)
    return InferenceWork(steps[0].replicas * seconds / tokens, dedicated=dedicated)


def _observed(steps: Sequence[ReplayedStep], poll: float) -> Saving:
    lost = [
        np.ceil(step.total([GENERATION]) / poll) * poll - step.total([GENERATION]) if poll else 0.0 for step in steps
    ]
    return Saving(f"saved already: stock verl looks at the rollout every {poll:g} s", float(np.mean(lost)))
