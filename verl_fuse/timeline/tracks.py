"""Finds order, role and sub-rows of a timeline's tracks, and sums by name.

Invariants (tests/unit/timeline/test_tracks.py):
- every track comes once, in the order step, lanes, replicas, slices, ranks, others, and by number within a role
  ("rank 2" before "rank 10");
- a plan, which is predicted for a rank, comes right after its rank;
- spans in one sub-row never overlap, every span is in exactly one sub-row, and there are no more sub-rows than
  spans that overlap at once.
"""

import heapq
from collections.abc import Iterable

from verl_fuse.spec.timeline import LANE, RANK, REPLICA, SLICE, STEP, Span, Timeline

TRACK_ROLES = (STEP, LANE, REPLICA, SLICE, RANK, "plan", "other")


def role(track: str) -> str:
    """Return the first word of the track's name if it is one of TRACK_ROLES, else "other"."""
    word = track.partition(" ")[0]
    return word if word in TRACK_ROLES else "other"


def number(track: str) -> int | None:
    """Return the number of "replica 3" or "rank 3"; None where the name has no number."""
    digits = track.partition(" ")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def ordered_tracks(timeline: Timeline) -> dict[str, tuple[Span, ...]]:
    """Return track -> its spans, in reading order."""
    return {track: timeline.on(track) for track in sorted(timeline.tracks, key=_reading_order)}


def spans_of(timeline: Timeline, kind: str) -> list[Span]:
    """Return the spans of all tracks of one role."""
    return [span for track, spans in timeline.by_track.items() if role(track) == kind for span in spans]


def totals(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the amounts of each name, in the order of the names' first appearance."""
    found: dict[str, float] = {}
    for name, amount in amounts:
        found[name] = found.get(name, 0.0) + amount
    return found


def pack(spans: Iterable[Span]) -> list[list[Span]]:
    """Put overlapping spans of one track into as few sub-rows as possible: first free sub-row, by start time."""
    rows: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end, s.name)):
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(rows))
            rows.append([])
        row = heapq.heappop(free)
        rows[row].append(span)
        heapq.heappush(busy, (span.end, row))
    return rows


def _reading_order(track: str) -> tuple[int, bool, int, bool, str]:
    index, kind = number(track), role(track)
    planned = kind == "plan"
    return TRACK_ROLES.index(RANK if planned else kind), index is None, index or 0, planned, track
