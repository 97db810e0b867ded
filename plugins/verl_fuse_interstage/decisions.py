"""When the tail of each step moves where `fuse.interstage.migration_threshold` is `auto`, and what came of it.

Invariants (tests/unit/interstage/test_decisions.py):
- a step is decided once, at its first poll, for as many samples of each data set as it has;
- what was decided of a step is told in its metrics and in no other's.
"""

import logging
from collections.abc import Mapping
from typing import Any

from verl_fuse.simulate.threshold import Threshold
from verl_fuse.spec.events import CheckpointSaved, Event, SetUp, StepEnded, Submitted
from verl_fuse.spec.step import ReplicaView, RolloutView
from verl_fuse.spec.timeline import Timeline
from verl_fuse_interstage.auto import AutoThreshold
from verl_fuse_interstage.learned import KEPT, InterstageHistory
from verl_fuse_interstage.measured import stage_seconds
from verl_fuse_interstage.migration import Trigger

logger = logging.getLogger(__name__)


class Decisions:
    """Of a run on replicas like `views` with `devices` each, whose rollout is configured by `rollout`."""

    def __init__(self, views: tuple[ReplicaView, ...], devices: int, rollout: Any) -> None:
        least = min((view.capacity for view in views), key=lambda capacity: capacity.tokens)
        self._auto = AutoThreshold(len(views), least, rollout.prompt_length + rollout.response_length)
        self._auto.warm_up()
        self._devices = devices
        self._prompts: Mapping[str, int] = {}
        self._step, self._chosen = 0, None

    def observe(self, event: Event) -> None:
        """Learn from what happens."""
        match event:
            case SetUp(resumed_from=folder):
                self._auto.learned = KEPT.load(folder, self._devices) or InterstageHistory()
            case Submitted(prompts=prompts):
                self._prompts = prompts
            case CheckpointSaved(folder=folder):
                self._auto.learned.save(folder, self._devices)
            case StepEnded(timeline=timeline, lengths=lengths):
                self._auto.learn(timeline, lengths)

    def trigger(self, view: RolloutView) -> Trigger:
        """When the tail of this step moves."""
        if self._step != view.step:
            each = view.expected // max(1, sum(self._prompts.values()))
            samples = {source: prompts * each for source, prompts in self._prompts.items()}
            self._step, self._chosen = view.step, self._auto.choose(samples or {"": view.expected})
        return Trigger(0) if self._chosen is None else Trigger(self._chosen.threshold, self._chosen.survivors)

    def metrics(self, timeline: Timeline) -> dict[str, float]:
        """What was chosen for the step of `timeline`, what that promised, and what came of it."""
        if self._step != timeline.step:
            return {}
        measured = stage_seconds(timeline)
        logger.info("step %d: %s", timeline.step, _told(self._chosen, measured))
        if self._chosen is None:
            return {}
        return {
            "fuse/migration_threshold": float(self._chosen.threshold),
            "fuse/predicted_stage_seconds": self._chosen.seconds,
            "fuse/predicted_stock_seconds": self._chosen.stock_seconds,
            "fuse/threshold_decision_seconds": self._auto.decision_seconds,
            **({} if measured is None else {"fuse/stage_seconds": measured}),
        }


def _told(chosen: Threshold | None, measured: float | None) -> str:
    took = "not measured" if measured is None else f"{measured:.2f} s measured"
    if chosen is None:
        return (
            f"migration threshold 0, decoding or inference has not been measured yet; generation and inference {took}"
        )
    kept = f"on {chosen.survivors} replicas" if chosen.threshold else "nothing migrates"
    return (
        f"migration threshold {chosen.threshold}, {kept}; generation and inference {chosen.seconds:.2f} s predicted "
        f"({chosen.stock_seconds:.2f} s without migration), {took}"
    )
