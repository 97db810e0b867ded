"""Learn for `critic: auto` from a run's own steps: the lengths of their samples, and the seconds of their parts. Every
checkpoint keeps this knowledge.

Invariants (tests/unit/placement/test_placement_learned.py):
- the first step of a process gives nothing: its parts load and compile;
- a step that cannot tell all parts gives nothing, a guess never;
- the work of the critic is counted in seconds of one device, wherever the critic was in that step;
- the run that goes on from a checkpoint has the knowledge of the run that wrote the checkpoint, as far as both have as
  many replicas of as many devices.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_fuse.spec.arrays import Ints
from verl_fuse.spec.kept import Kept, amount, measured, token_pairs, whole
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import (
    GENERATION,
    LANE,
    RANK,
    REPLICA,
    REQUEST,
    SLICE,
    STEP,
    UPDATE_CRITIC,
    VALUES,
    WAIT_FOR_CRITIC,
    Timeline,
)
from verl_fuse.timeline.decode import DecodeCost, decode_cost
from verl_fuse.timeline.tracks import role, totals
from verl_fuse.timeline.warm import WarmTracks

PLACEMENT_STEPS = 12


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of one step in which `replicas` generated, in seconds. `rest`: all that neither generation nor the
    critic took of the step. `update` and `values`: the critic's work, in seconds of one device; `late` are those of
    `values` that were computed after generation."""

    replicas: int
    generation: float
    rest: float
    update: float
    values: float
    late: float


@dataclass(frozen=True, slots=True)
class CriticMemory:
    """The critic has so many `parameters`; a device has so many bytes (None: it is the host)."""

    parameters: int
    device: int | None


@dataclass
class PlacementHistory:
    """The knowledge from earlier steps of a run with `replicas`, the newest step first, PLACEMENT_STEPS at most:
    (prompt, response) tokens of each sample of a step, and the step's parts. The cost of decoding is None before it was
    measured."""

    replicas: int
    steps: deque[tuple[Ints, StepParts]] = field(default_factory=lambda: deque(maxlen=PLACEMENT_STEPS))
    decode: DecodeCost | None = None
    capacity: Capacity = field(default_factory=lambda: Capacity(1))
    memory: CriticMemory | None = None
    warm: WarmTracks = field(default_factory=WarmTracks)
    cold: bool = True

    def learn(self, timeline: Timeline, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Take in a finished step with the lengths of its samples by data set."""
        warm = self.warm.of(timeline)
        cold, self.cold = self.cold, False
        rows = np.array([pair for found in lengths.values() for pair in found], np.int64).reshape(-1, 2)
        parts = None if cold else step_parts(timeline)
        decode = decode_cost(warm, self.capacity)
        # Without a cost per sequence the step does not tell what fewer replicas would take.
        if parts is None or not len(rows) or decode is None or decode.sequence <= 0:
            return
        self.decode = decode
        self.steps.appendleft((rows, parts))

    def save(self, folder: Path, devices: int) -> None:
        """Write the knowledge into a checkpoint's folder; a replica has `devices` devices."""
        costs = {
            "replicas": self.replicas,
            "steps": [astuple(parts) for _, parts in self.steps],
            "decode": self.decode and asdict(self.decode),
            "sequences": self.capacity.sequences,
            "tokens": None if math.isinf(self.capacity.tokens) else self.capacity.tokens,
            "memory": self.memory and asdict(self.memory),
        }
        KEPT.save(folder, [rows.tolist() for rows, _ in self.steps], costs, devices)


def step_parts(timeline: Timeline) -> StepParts | None:
    """Read the parts of a step off its timeline; None where a part is missing."""
    stages = totals((span.name, span.seconds) for span in timeline.on(STEP))
    replicas = {s.track for s in timeline.spans if role(s.track) == REPLICA and s.name == REQUEST}
    (update, _), (values, ranks) = _critic(timeline, UPDATE_CRITIC), _critic(timeline, VALUES)
    # A checkpoint waits for the update of its own step, beside which another one of the step before may have ended.
    updates = sum(role(span.track) == LANE and span.name == UPDATE_CRITIC for span in timeline.spans)
    update /= max(1, updates)
    if not (replicas and update and values and stages.get(GENERATION)):
        return None
    apart = (GENERATION, VALUES, WAIT_FOR_CRITIC, UPDATE_CRITIC)
    rest = timeline.end - timeline.start - sum(stages.get(name, 0.0) for name in apart)
    late = min(values, stages.get(VALUES, 0.0) * ranks)
    return StepParts(len(replicas), stages[GENERATION], max(0.0, rest), update, values, late)


def _critic(timeline: Timeline, name: str) -> tuple[float, int]:
    """Return (seconds of one device that the critic's workers, and copies on slices, took for `name`; the number of its
    workers)."""
    ranks = {span.track for span in timeline.spans if role(span.track) == RANK and span.name == name}
    calls = sum(span.seconds for span in timeline.spans if role(span.track) == LANE and span.name == name)
    copies = sum(span.seconds for span in timeline.spans if role(span.track) == SLICE and span.name == name)
    return calls * len(ranks) + copies, len(ranks)


def _parsed(lengths: Any, costs: Mapping[str, Any] | None) -> PlacementHistory | None:
    if costs is None:
        return None
    found = PlacementHistory(whole(costs["replicas"], 1))
    for rows, (replicas, *parts) in zip(lengths, costs["steps"], strict=True):
        found.steps.append((token_pairs(rows), StepParts(whole(replicas, 1), *map(amount, parts))))
    found.decode = measured(DecodeCost, costs["decode"])
    tokens, memory = costs["tokens"], costs["memory"]
    found.capacity = Capacity(whole(costs["sequences"], 1), math.inf if tokens is None else whole(tokens, 1))
    if memory is not None:
        device = None if memory["device"] is None else whole(memory["device"], 1)
        found.memory = CriticMemory(whole(memory["parameters"]), device)
    return found


KEPT = Kept("placement", _parsed)
