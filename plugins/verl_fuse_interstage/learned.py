"""Learn for the automatic threshold from earlier steps: lengths by data set, and the costs of decoding, inference and
migration. Every checkpoint keeps this knowledge.

Invariants (tests/unit/interstage/test_threshold_learned.py):
- the first step of a replica or of an inference lane gives lengths, but no cost;
- tokens that no engine generated (answers of tools) count as tokens of the prompt: they are prefilled, not decoded;
- the run that goes on from a checkpoint has the knowledge of the run that wrote the checkpoint.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from verl_fuse.spec.kept import Kept, amount, measured, token_pairs
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.decode import DecodeCost, decode_cost
from verl_fuse.timeline.generated import generated_share, generated_tokens
from verl_fuse.timeline.warm import WarmTracks
from verl_fuse_interstage.measured import (
    DraftedDecode,
    InferenceCost,
    drafted_decode,
    inference_cost,
    migration_seconds,
    update_cost,
)

REMEMBERED_STEPS = 12


@dataclass
class InterstageHistory:
    """The knowledge from earlier steps. `lengths`: (prompt, response) tokens of each sample, by data set and step, the
    newest step first, REMEMBERED_STEPS at most; `update`: replica-seconds of the actor's update per token; a cost is
    None before it was measured."""

    lengths: dict[str, deque[np.ndarray]] = field(default_factory=dict)
    decode: DecodeCost | None = None
    drafted: DraftedDecode | None = None
    inference: InferenceCost | None = None
    update: float | None = None
    migration: float = 0.0
    warm: WarmTracks = field(default_factory=WarmTracks)

    def learn(
        self,
        timeline: Timeline,
        lengths: Mapping[str, Sequence[tuple[int, int]]],
        replicas: int,
        capacity: Capacity,
        metrics: Mapping[str, float] = MappingProxyType({}),
        responses: int = 0,
    ) -> None:
        """Take in a finished step on `replicas` whose engines have `capacity`, and the step's metrics; `responses` are
        the response tokens of all its samples, trained or not."""
        warm = self.warm.of(timeline)
        if not any(lengths.values()):
            return
        share = generated_share(generated_tokens(timeline).total(), responses)
        for source, rows in lengths.items():
            known = self.lengths.setdefault(source, deque(maxlen=REMEMBERED_STEPS))
            known.appendleft(_decoded(np.asarray(rows, np.int64), share))
        tokens = int(sum(np.sum(rows) for rows in lengths.values()))
        decode = decode_cost(warm, capacity)
        self.decode = decode or self.decode
        self.drafted = (drafted_decode(metrics) if decode else None) or self.drafted
        self.inference = inference_cost(warm, replicas, tokens) or self.inference
        self.update = update_cost(warm, replicas, tokens) or self.update
        stopping = migration_seconds(warm)
        self.migration = self.migration if stopping is None else stopping

    def save(self, folder: Path, devices: int) -> None:
        """Write the knowledge into a checkpoint's folder; a replica has `devices` devices."""
        lengths = {source: [rows.tolist() for rows in steps] for source, steps in self.lengths.items()}
        costs = {
            "decode": self.decode and asdict(self.decode),
            "drafted": self.drafted and asdict(self.drafted),
            "inference": self.inference and asdict(self.inference),
            "update": self.update,
            "migration": self.migration,
        }
        KEPT.save(folder, lengths, costs, devices)


def _decoded(rows: np.ndarray, share: float | None) -> np.ndarray:
    """Return (prompt, response) tokens with the tokens of tools moved from response to prompt, by the step's share of
    generated tokens."""
    if share is None or not rows.size:
        return rows
    generated = np.round(rows[:, 1] * share).astype(np.int64)
    return np.stack([rows.sum(1) - generated, generated], axis=1)


def _parsed(lengths: Mapping[str, Any], costs: Mapping[str, Any] | None) -> InterstageHistory:
    found = InterstageHistory()
    for source, steps in lengths.items():
        found.lengths[str(source)] = deque(map(token_pairs, steps), maxlen=REMEMBERED_STEPS)
    if costs is not None:
        found.decode = measured(DecodeCost, costs["decode"])
        found.drafted = measured(DraftedDecode, costs.get("drafted"))
        found.inference = measured(InferenceCost, costs["inference"])
        found.update = None if costs.get("update") is None else amount(costs["update"])
        found.migration = amount(costs["migration"])
    return found


KEPT = Kept("interstage", _parsed)
