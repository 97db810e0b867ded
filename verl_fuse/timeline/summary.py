"""Sums a step up in a few numbers, which the metrics, the pages and the index show.

Invariants (tests/unit/timeline/test_summary.py):
- `StepSummary.from_dict(asdict(summary)) == summary`, also through JSON;
- a number that the timeline cannot give is None, never 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_fuse.spec.block import read_block
from verl_fuse.spec.timeline import (
    ABORTED,
    GENERATION,
    LANE,
    PLANNED_SECONDS,
    RANK,
    REPLICA,
    STEP,
    Timeline,
    overlap_seconds,
    union_seconds,
)
from verl_fuse.timeline.idle import idle_table
from verl_fuse.timeline.tracks import spans_of, totals

# The long tail begins when this share of the step's requests has finished.
TAIL_BEGINS = 0.8


@dataclass(frozen=True)
class StepSummary:
    """A summary of one step. Seconds are wall-clock; `stages` are the driver's, in order; `idle` maps a role to its
    idle fraction.

    `generation_seconds` is the driver's stage "gen" (where the step has none: from the first request's start to the
    last one's end); `long_tail_fraction` is the share of generation that is left once 80 % of the requests
    have finished.
    `overlap_seconds` is inference of the lanes inside the driver's stage "gen". `planned` has, for each planned
    stage, its name, the planned seconds and the measured seconds.
    """

    step: int
    seconds: float
    stages: tuple[tuple[str, float], ...]
    requests: int
    generation_seconds: float | None
    long_tail_fraction: float | None
    inference_seconds: float | None
    overlap_seconds: float | None
    idle: Mapping[str, float]
    idle_overall: float | None
    planned: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepSummary":
        """Read a summary from the output of `dataclasses.asdict` and JSON; a FuseError names the fault of any other
        data."""
        return read_block(cls, data, "step summary")


def summarize(timeline: Timeline) -> StepSummary:
    """Condense a timeline."""
    stages = totals((span.name, span.seconds) for span in sorted(timeline.on(STEP), key=lambda s: s.start))
    parts = [span for span in spans_of(timeline, REPLICA) if span.category == "generate"]
    # Of a request that another replica finishes, the last part counts.
    requests = [s for s in parts if s.args.get("stop_reason") not in ABORTED]
    ends = sorted(span.end for span in requests)
    window = ends[-1] - min(span.start for span in parts) if requests else None
    tail = ends[-1] - ends[math.ceil(TAIL_BEGINS * len(ends)) - 1] if requests else 0.0
    inference = [(span.start, span.end) for span in spans_of(timeline, LANE) if span.category == "inference"]
    stage = [(s.start, s.end) for s in timeline.on(STEP) if s.name == GENERATION]
    generation = union_seconds(stage) if stage else window
    table = idle_table(timeline)
    idle = {kind: table.idle_fraction(kind) for kind in ("device", REPLICA, RANK)}
    return StepSummary(
        step=timeline.step,
        seconds=timeline.end - timeline.start,
        stages=tuple(stages.items()),
        requests=len(requests),
        generation_seconds=generation,
        long_tail_fraction=tail / generation if requests and generation else None,
        inference_seconds=union_seconds(inference) if inference else None,
        overlap_seconds=overlap_seconds(stage, inference) if inference else None,
        idle={kind: fraction for kind, fraction in idle.items() if fraction is not None},
        idle_overall=table.overall,
        planned=_planned(timeline),
    )


def _planned(timeline: Timeline) -> tuple[tuple[str, float, float], ...]:
    """Return (stage, seconds planned, seconds of all its spans on that track) of the stages whose span has planned
    seconds, in order."""
    said = sorted((span for span in timeline.spans if PLANNED_SECONDS in span.args), key=lambda span: span.start)
    rows = []
    for span in said:
        took = sum(other.seconds for other in timeline.on(span.track) if other.name == span.name)
        rows.append((span.name, float(span.args[PLANNED_SECONDS]), took))
    return tuple(rows)
