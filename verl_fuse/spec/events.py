"""Defines events of a running step, for observers: one class per kind of event, plain values, no handles.

Invariant (tests/unit/spec/test_events.py): every kind is a frozen class with the step and the time of the event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import RolloutView
from verl_fuse.spec.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Event:
    """An event in `step`, at `time` (Unix seconds)."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class SetUp(Event):
    """The run is set up and begins after `step`, which is not 0 where the run goes on from the checkpoint in
    `resumed_from`.

    The run has `total_steps`; each step trains `expected` samples, of `groups` prompts.
    """

    run_dir: Path
    resumed_from: Path | None
    total_steps: int
    expected: int
    groups: int


@dataclass(frozen=True, slots=True)
class StepBegun(Event):
    """The step begins."""


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    """Prompts are about to be generated: `prompts` is the number of each data set's prompts that the step has by now. A
    step may ask for more while it runs."""

    prompts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Polled(Event):
    """The driver looked at the running rollout."""

    view: RolloutView


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """Replicas `freed` have stopped and `survivors` go on, by a decision on `view`."""

    view: RolloutView
    survivors: tuple[int, ...]
    freed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generated(Event):
    """All samples are generated: `responses` are the response tokens of each by prompt `uid`, `discarded` the response
    tokens of groups that are not trained on; `missing` samples were asked for and failed.

    `prompts` are the prompts planned through `fuse_predict`, `fuse_scale` and `fuse_assign`, by `uid`.
    """

    responses: Mapping[str, Sequence[int]]
    discarded: Mapping[str, Sequence[int]]
    prompts: Mapping[str, Prompt]
    missing: int = 0


@dataclass(frozen=True, slots=True)
class StageBegun(Event):
    """The stage `name` begins on the driver."""

    name: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint has been written to `folder`."""

    folder: Path


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The step, which trained `samples`, is over; `lengths` are prompt and response tokens of each sample, by data set,
    `metrics` the metrics that verl-fuse logs for the step."""

    timeline: Timeline
    samples: int
    lengths: Mapping[str, Sequence[tuple[int, int]]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingEnded(Event):
    """The last step is over."""
