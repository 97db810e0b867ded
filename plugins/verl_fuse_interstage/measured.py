"""What a step's timeline says of the costs that the migration threshold weighs, beside decoding. Pure: a timeline in, seconds out.

A timeline that cannot tell gives None, never a guess (tests/unit/interstage/test_measured.py).
"""

from dataclasses import dataclass

import numpy as np

from verl_fuse.spec.timeline import Timeline, union_seconds


@dataclass(frozen=True, slots=True)
class InferenceCost:
    """All models together: replica-seconds per token of prompt and response, and seconds of one micro-group."""

    per_token: float
    group: float


def inference_cost(timeline: Timeline, replicas: int, tokens: int) -> InferenceCost | None:
    """From the lanes' inference spans: a slice's lane runs on the devices of one replica, any other on all."""
    spans = {track: [s for s in timeline.on(track) if s.category == "inference"] for track in timeline.tracks}
    lanes = {track: found for track, found in spans.items() if track.startswith("lane ") and found}
    groups = [span.seconds for found in lanes.values() for span in found if "micro_group" in span.args]
    if not groups or tokens <= 0:
        return None
    seconds = sum(
        union_seconds((span.start, span.end) for span in found) * (1 if "slice" in track else replicas)
        for track, found in lanes.items()
    )
    return InferenceCost(seconds / tokens, float(np.median(groups)))


def migration_seconds(timeline: Timeline) -> float | None:
    """Seconds the slowest replica took to stop, if the step migrated."""
    return max((span.seconds for span in timeline.spans if span.name == "migrate"), default=None)


def stage_seconds(timeline: Timeline) -> float | None:
    """Seconds from the start of generation to the end of inference."""
    starts = [span.start for span in timeline.on("step") if span.name == "gen"]
    ends = [s.end for s in timeline.spans if s.track.startswith("lane ") and s.category == "inference"]
    return max(ends) - min(starts) if starts and ends else None
