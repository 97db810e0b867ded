"""`migration_threshold: auto` finds R_t and the survivors by simulating the next rollout on recent lengths, with costs
measured in earlier steps.

Invariants (tests/unit/interstage/test_auto.py, test_decisions.py):
- before a step has been measured, and wherever no gain is predicted, nothing migrates;
- data sets are kept apart, and recent steps count more: the lengths of a data set's step `age` before its last one are
  drawn with weight DECAY ** age;
- the price includes the freed devices' work: inference, and the update of complete groups if updates are streamed;
- a step is decided once, at its first poll, for as many samples of each data set as the step has; its metrics, and no
  other step's, tell the decision.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from verl_fuse.simulate.rollout import Requests
from verl_fuse.simulate.streamed import StreamedUpdate
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.simulate.threshold import Threshold, best_threshold
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.events import CheckpointSaved, Event, Generated, SetUp, StepEnded, Submitted
from verl_fuse.spec.step import Capacity, ReplicaView, RolloutView
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_interstage.learned import KEPT, InterstageHistory
from verl_fuse_interstage.measured import DraftedDecode, InferenceCost, stage_seconds
from verl_fuse_interstage.migration import Trigger

logger = logging.getLogger(__name__)

DECAY = 0.7
DRAWN_BATCHES = 2


class AutoThreshold:
    """Learn from each step's timeline and choose the threshold of the next step. A replica's engine has `capacity`;
    `longest` is prompt plus response, in tokens. `infers`: samples go through inference; `streams`: updates are
    streamed."""

    def __init__(self, replicas: int, capacity: Capacity, longest: int, *, infers: bool = True, streams: bool = False):
        self._replicas, self._capacity, self._longest = replicas, capacity, longest
        self._infers, self._streams = infers, streams
        self.learned, self.decision_seconds = InterstageHistory(), 0.0
        self._rng = np.random.default_rng(0)

    def warm_up(self) -> None:
        """Compile the code that a choice runs, so that the first choice does not wait for compilation."""
        timing = self._timing(DecodeCost(1.0, 0.0), InferenceCost(1.0, 0.0))
        best_threshold([Requests.of(np.ones(8, np.int64), np.arange(1, 9))], 2, timing, InferenceWork(1.0))

    def learn(
        self,
        timeline: Timeline,
        lengths: Mapping[str, Sequence[tuple[int, int]]],
        metrics: Mapping[str, float] = MappingProxyType({}),
        responses: int = 0,
    ) -> None:
        """Take in a finished step: its timeline, (prompt, response) tokens of its samples by data set, the metrics that
        plugins counted, and the response tokens of all samples, discarded ones too."""
        self.learned.learn(timeline, lengths, self._replicas, self._capacity, metrics, responses)

    def choose(self, samples: Mapping[str, int], each: int) -> Threshold | None:
        """Return the threshold for a step of `samples` samples by data set, `each` of a prompt; None before anything
        was measured."""
        begun = time.perf_counter()
        known = self.learned
        cost = known.inference if self._infers else InferenceCost(0.0, 0.0)
        if known.decode is None or cost is None or not known.lengths or (self._streams and known.update is None):
            return None
        draws = [self._draw(samples, each if self._streams else 1) for _ in range(DRAWN_BATCHES)]
        inference = InferenceWork(cost.per_token, last_seconds=cost.group)
        update, groups = None, ()
        if self._streams and known.update is not None:
            update = StreamedUpdate(known.update, when_done=False)
            groups = [np.arange(len(draw)) // each for draw in draws]
        # A prefill is a forward pass of the policy: a third of an update where nothing is inferred.
        forward = cost if self._infers else InferenceCost((known.update or 0.0) / 3, 0.0)
        timing = self._timing(known.drafted or known.decode, forward)
        moving = MigrationCost(known.migration)
        chosen = best_threshold(draws, self._replicas, timing, inference, moving, update, groups)
        self.decision_seconds = time.perf_counter() - begun
        return chosen

    def _draw(self, samples: Mapping[str, int], each: int = 1) -> Requests:
        """Draw the lengths of as many requests, `each` of a prompt together, in random order of prompts; a data set not
        seen yet has lengths like any data set seen."""
        parts = []
        for source, count in samples.items():
            lengths = self.learned.lengths
            seen = [lengths[source]] if source in lengths else list(lengths.values())
            steps = [
                (groups, DECAY**age / len(groups))
                for history in seen
                for age, rows in enumerate(history)
                for groups in [_groups(rows, each)]
            ]
            weights = np.concatenate([np.full(len(groups), weight) for groups, weight in steps])
            chosen = self._rng.choice(len(weights), size=-(-count // each), p=weights / weights.sum())
            parts.append(np.concatenate([groups for groups, _ in steps])[chosen])
        drawn = self._rng.permutation(np.concatenate(parts)).reshape(-1, 2)
        return Requests.of(drawn[:, 0], np.maximum(drawn[:, 1], 1))

    def _timing(self, decode: DecodeCost | DraftedDecode, inference: InferenceCost) -> ReplicaTiming:
        # A prefill is a forward pass of the policy alone; inference passes each token through all models, so this cost
        # of a prefill is on the careful side.
        return ReplicaTiming.build(
            lambda sequences, context: decode.seconds(sequences),
            lambda sequences, tokens: decode.step + inference.per_token * sequences * tokens,
            max_batch=self._capacity.sequences,
            kv_capacity=max(self._longest, int(min(self._capacity.tokens, self._capacity.sequences * self._longest))),
            longest=self._longest,
        )


def _groups(rows: np.ndarray, each: int) -> np.ndarray:
    """Return the rows as an array (groups, each, 2), in which rows of one prompt stand together. A group that lost a
    sample is filled up from the next group; a step of fewer rows than a group is filled up with its first rows."""
    return np.resize(rows, (max(1, len(rows) // each), each, 2))


class Decisions:
    """The threshold of each step of a run on replicas like `views` with `devices` each, whose rollout is configured by
    `rollout`; see `AutoThreshold` for `infers` and `streams`."""

    def __init__(
        self, views: tuple[ReplicaView, ...], devices: int, rollout: Any, *, infers: bool = True, streams: bool = False
    ) -> None:
        self._auto = AutoThreshold(
            len(views),
            min((view.capacity for view in views), key=lambda capacity: capacity.tokens),
            rollout.prompt_length + rollout.response_length,
            infers=infers,
            streams=streams,
        )
        self._streams = streams
        self._auto.warm_up()
        self._prompts: Mapping[str, int] = {}
        self._devices, self._step, self._chosen = devices, 0, None
        self._responses = 0

    def observe(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case SetUp(resumed_from=folder):
                self._auto.learned = KEPT.load(folder, self._devices) or InterstageHistory()
            case Submitted(prompts=prompts):
                self._prompts = prompts
            case CheckpointSaved(folder=folder):
                self._auto.learned.save(folder, self._devices)
            case Generated(responses=responses, discarded=discarded):
                self._responses = sum(map(sum, responses.values())) + sum(map(sum, discarded.values()))
            case StepEnded(timeline=timeline, lengths=lengths, metrics=metrics):
                self._auto.learn(timeline, lengths, metrics, self._responses)

    def trigger(self, view: RolloutView) -> Trigger:
        """Return when the tail of this step moves."""
        if self._step != view.step:
            prompts = sum(self._prompts.values())
            each = view.expected // prompts if prompts else 1
            samples = {source: prompts * each for source, prompts in self._prompts.items()}
            self._step, self._chosen = view.step, self._auto.choose(samples or {"": view.expected}, max(1, each))
        return Trigger(0) if self._chosen is None else Trigger(self._chosen.threshold, self._chosen.survivors)

    def metrics(self, timeline: Timeline) -> dict[str, float]:
        """Return the choice for the step of `timeline`, its prediction and its outcome."""
        if self._step != timeline.step:
            return {}
        measured = stage_seconds(timeline, self._streams)
        what = "generation, inference and update" if self._streams else "generation and inference"
        logger.info("step %d: %s", timeline.step, _told(self._chosen, measured, what))
        if self._chosen is None:
            return {}
        return {
            "fuse/migration_threshold": float(self._chosen.threshold),
            "fuse/predicted_stage_seconds": self._chosen.seconds,
            "fuse/predicted_stock_seconds": self._chosen.stock_seconds,
            "fuse/threshold_decision_seconds": self._auto.decision_seconds,
            **({} if measured is None else {"fuse/stage_seconds": measured}),
        }


def _told(chosen: Threshold | None, measured: float | None, what: str) -> str:
    took = "not measured" if measured is None else f"{measured:.2f} s measured"
    if chosen is None:
        return f"migration threshold 0, not all of {what} has been measured yet; {what} {took}"
    kept = f"on {chosen.survivors} replicas" if chosen.threshold else "nothing migrates"
    return (
        f"migration threshold {chosen.threshold}, {kept}; {what} {chosen.seconds:.2f} s predicted "
        f"({chosen.stock_seconds:.2f} s without migration), {took}"
    )
