"""Learn response lengths, and the costs of decoding and of creating a replica, from earlier steps. Every checkpoint
keeps this knowledge.

Invariants (tests/unit/elastic/test_learned.py):
- the cost of decoding is not taken from a replica's first step;
- the run that goes on from a checkpoint makes the predictions of the run that wrote the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_fuse.spec.kept import Kept, amount, measured
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.decode import DecodeCost, decode_cost
from verl_fuse.timeline.warm import WarmTracks
from verl_fuse_elastic.corrections import Corrections
from verl_fuse_elastic.ledger import starting
from verl_fuse_elastic.prediction import LengthPredictor, calibration
from verl_fuse_elastic.turns import GeneratedShares


@dataclass
class ElasticHistory:
    """The knowledge from earlier steps. `decode` is None before decoding was measured; `launch_seconds` are the seconds
    for which the last standalone replica held devices while being created."""

    predictor: LengthPredictor = field(default_factory=LengthPredictor)
    shares: GeneratedShares = field(default_factory=GeneratedShares)
    decode: DecodeCost | None = None
    launch_seconds: float = 0.0
    corrections: Corrections = field(default_factory=Corrections)
    warm: WarmTracks = field(default_factory=WarmTracks)

    def learn_lengths(self, prompts: Mapping[str, Prompt], lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Take in the response tokens of each sample by prompt, trained on or not; return how good the predictions
        were."""
        visits = [(prompts[uid], found) for uid, found in lengths.items() if uid in prompts]
        self.predictor.observe(visits)
        return calibration([(prompt.prediction, found) for prompt, found in visits if prompt.prediction is not None])

    def learn_costs(self, timeline: Timeline, capacity: Capacity) -> None:
        """Take in a finished step; a replica's engine has `capacity`."""
        self.decode = decode_cost(self.warm.of(timeline), capacity) or self.decode
        self.launch_seconds = max(starting(timeline), default=self.launch_seconds)

    def save(self, folder: Path, devices: int) -> None:
        """Write the knowledge into a checkpoint's folder; a replica has `devices` devices."""
        costs = {
            "decode": self.decode and asdict(self.decode),
            "launch_seconds": self.launch_seconds,
            "corrections": self.corrections.to_dict(),
        }
        lengths = {**self.predictor.to_dict(), "generated": self.shares.by_source}
        KEPT.save(folder, lengths, costs, devices)


def _parsed(lengths: Any, costs: Mapping[str, Any] | None) -> ElasticHistory:
    # A checkpoint of an earlier release has no shares.
    shares = {str(source): amount(share) for source, share in lengths.get("generated", {}).items()}
    found = ElasticHistory(LengthPredictor.from_dict(lengths), GeneratedShares(shares))
    if costs is not None:
        found.decode = measured(DecodeCost, costs["decode"])
        found.launch_seconds = amount(costs["launch_seconds"])
        # A checkpoint of an earlier release has no corrections.
        if "corrections" in costs:
            found.corrections = Corrections.from_dict(costs["corrections"])
    return found


KEPT = Kept("elastic", _parsed)
