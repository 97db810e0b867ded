"""Read the costs that the migration threshold weighs beside decoding off a step's timeline. Pure: a timeline in,
seconds out.

A timeline that cannot tell gives None, never a guess (tests/unit/interstage/test_measured.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_fuse.spec.arrays import Floats
from verl_fuse.spec.timeline import (
    CRITIC_LANE,
    GENERATION,
    LANE,
    MIGRATE,
    RANK,
    SLICE,
    STEP,
    STREAM_UPDATE,
    UPDATE_ACTOR,
    Timeline,
    overlap_seconds,
    union_seconds,
)
from verl_fuse.timeline.tracks import role, spans_of


@dataclass(frozen=True, slots=True)
class InferenceCost:
    """The cost of all models together: replica-seconds per token of prompt and response, and seconds of one
    micro-group."""

    per_token: float
    group: float


@dataclass(frozen=True, slots=True)
class DraftedDecode:
    """The cost of decoding with drafts, which are given where they pay. A pass of b sequences takes `step + sequence *
    b` seconds. With `drafted` tokens beside each sequence a pass takes as long as a pass of b * (1 + drafted)
    sequences, and gives each sequence `tokens` tokens."""

    step: float
    sequence: float
    tokens: float
    drafted: float

    def seconds(self, sequences: Floats) -> Floats:
        """Return the seconds in which each of `sequences` sequences gets a token."""
        tried = (self.step + self.sequence * (1 + self.drafted) * sequences) / self.tokens
        return np.minimum(self.step + self.sequence * sequences, tried)


def drafted_decode(metrics: Mapping[str, float]) -> DraftedDecode | None:
    """Return the figures that fuse.speculation counted in a step's tail; None where speculation was off, or the step
    cannot tell."""
    names = ("pass_seconds", "token_seconds", "tail_tokens_per_pass", "tail_acceptance")
    found = [value for name in names if (value := metrics.get(f"fuse/speculation_{name}")) is not None]
    if len(found) < len(names):
        return None
    step, sequence, tokens, accepted = found
    return DraftedDecode(step, sequence, tokens, (tokens - 1) / accepted if accepted > 0 else 0.0)


def inference_cost(timeline: Timeline, replicas: int, tokens: int) -> InferenceCost | None:
    """Return the cost of inference from the lanes' spans: a slice's lane runs on the devices of one replica, the
    training workers' lane on all devices. No freed replica takes part in inference on a critic's own devices."""
    spans = {track: [s for s in timeline.on(track) if s.category == "inference"] for track in timeline.tracks}
    lanes = {t: found for t, found in spans.items() if role(t) == LANE and found and t != f"{LANE} {CRITIC_LANE}"}
    groups = [span.seconds for found in lanes.values() for span in found if "micro_group" in span.args]
    if not groups or tokens <= 0:
        return None
    seconds = sum(
        union_seconds((span.start, span.end) for span in found) * (1 if SLICE in track else replicas)
        for track, found in lanes.items()
    )
    return InferenceCost(seconds / tokens, float(np.median(groups)))


def update_cost(timeline: Timeline, replicas: int, tokens: int) -> float | None:
    """Return replica-seconds of the actor's update per token, streamed or not, from the spans of its ranks."""
    ranks = [track for track in timeline.tracks if role(track) == RANK]
    found = [
        span.seconds for track in ranks for span in timeline.on(track) if span.name in (UPDATE_ACTOR, STREAM_UPDATE)
    ]
    return sum(found) / len(ranks) * replicas / tokens if found and tokens > 0 else None


def migration_seconds(timeline: Timeline) -> float | None:
    """Return the seconds in which the slowest replica stopped, if the step migrated."""
    return max((span.seconds for span in timeline.spans if span.name == MIGRATE), default=None)


def streaming_metrics(timeline: Timeline) -> dict[str, float]:
    """Return the inference that ran while others still generated, and the samples that went through lanes."""
    generation = [(span.start, span.end) for span in timeline.on(STEP) if span.name == GENERATION]
    inference = [(s.start, s.end) for s in spans_of(timeline, LANE) if s.category == "inference"]
    hidden, total = overlap_seconds(generation, inference), union_seconds(inference)
    groups = {
        span.args["micro_group"]: int(span.args["samples"]) for span in timeline.spans if "micro_group" in span.args
    }
    return {
        "fuse/overlap_seconds": hidden,
        "fuse/overlap_fraction": hidden / total if total else 0.0,
        "fuse/streamed_samples": float(sum(groups.values())),
    }


def stage_seconds(timeline: Timeline, update: bool = False) -> float | None:
    """Return the seconds from the start of generation to the end of inference, or of the actor's update (`update`)."""
    starts = [span.start for span in timeline.on(STEP) if span.name == GENERATION]
    ends = [span.end for span in spans_of(timeline, LANE) if span.category == "inference"]
    if update:
        ends = [span.end for span in timeline.on(STEP) if span.name == UPDATE_ACTOR]
    return max(ends) - min(starts) if starts and ends else None
