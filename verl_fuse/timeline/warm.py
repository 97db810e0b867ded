"""Keeps the part of a step's timeline that shows how long work takes, without work that is done for the first time.

A replica's first step, and a lane's first inference, load code, compile and allocate. Nearly all requests of that step
begin meanwhile, so no part of the step is measured apart.

Invariants (tests/unit/timeline/test_warm.py):
- a replica counts from the second step on in which it generates, whenever it joined the run;
- lanes count together, from the first step in which no inferring lane infers for the first time: they share the samples
of a step;
- all other tracks always count.
"""

from dataclasses import replace

from verl_fuse.spec.timeline import LANE, REPLICA, Timeline
from verl_fuse.timeline.tracks import role, spans_of

# Categories of work that takes longer the first time.
WORK = {REPLICA: "generate", LANE: "inference"}


class WarmTracks:
    """A record of the tracks of this process's run that have worked."""

    def __init__(self) -> None:
        self._worked: set[str] = set()

    def of(self, timeline: Timeline) -> Timeline:
        """Return `timeline`, of a step later than all before, without its cold tracks."""
        working = {
            span.track for kind, work in WORK.items() for span in spans_of(timeline, kind) if span.category == work
        }
        cold = {track for track in timeline.tracks if role(track) == REPLICA} - self._worked
        if any(role(track) == LANE for track in working - self._worked):
            cold |= {track for track in timeline.tracks if role(track) == LANE}
        self._worked |= working
        if cold.isdisjoint(timeline.tracks):
            return timeline
        return replace(timeline, spans=tuple(span for span in timeline.spans if span.track not in cold))
