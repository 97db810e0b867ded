"""Finds the work of each device over a step, for charts: stretches of work, and the idle time between them.

Invariants (tests/unit/timeline/test_devices.py):
- the stretches of a row cover the step; the stretches that are not idle sum up to the device's busy seconds;
- every device is in one row, and rows that are folded differ by less than SAME of the step everywhere;
- the largest idle stretch is one of the stretches, and no other has more device time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_fuse.spec.timeline import RANK, REPLICA, Span, Timeline, merge
from verl_fuse.timeline.html import IDLE
from verl_fuse.timeline.idle import device_tracks
from verl_fuse.timeline.tracks import ordered_tracks, role

# Devices whose stretches differ by less than this share of the step are drawn as one row, where there are many.
SAME = 0.005
MANY = 8

Stretch = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Devices with the same work; a stretch is (category or "idle", start, end) in seconds since the step began."""

    names: tuple[str, ...]
    stretches: tuple[Stretch, ...]

    @property
    def label(self) -> str:
        """Return the name of the row."""
        return label(self.names)


def label(names: Sequence[str]) -> str:
    """Return "device 3", or "device 0 to 7" for neighbours with the same work."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition(' ')[2]}"


def device_rows(timeline: Timeline) -> tuple[DeviceRow, ...]:
    """Return one row per device; neighbours with the same work are one row where there are more than MANY.

    Where the step does not tell the devices of its replicas, a row is a replica or a rank.
    """
    tracks = ordered_tracks(timeline)
    parts = device_tracks(tracks)
    if parts:
        rows = [DeviceRow((f"device {i}",), _stretches(timeline, tracks, names)) for i, names in enumerate(parts)]
    else:
        alone = [track for track in tracks if role(track) in (REPLICA, RANK)]
        rows = [DeviceRow((track,), _stretches(timeline, tracks, (track,))) for track in alone]
    return tuple(_folded(rows, SAME * (timeline.end - timeline.start)) if len(rows) > MANY else rows)


def largest_idle(rows: Sequence[DeviceRow]) -> tuple[DeviceRow, float, float] | None:
    """Return the row and the stretch, in seconds since the step began, in which the most device time is idle at once;
    None where no device is ever idle."""
    stretches = [(row, start, end) for row in rows for category, start, end in row.stretches if category == IDLE]
    return max(stretches, key=lambda one: (one[2] - one[1]) * len(one[0].names), default=None)


def _stretches(timeline: Timeline, tracks: Mapping[str, Sequence[Span]], names: Sequence[str]) -> tuple[Stretch, ...]:
    """Return the stretches of a device; where spans of two categories overlap, the later span is shown."""
    spans = [span for name in names for span in tracks.get(name, ()) if span.category != "wait"]
    clipped = [
        (max(span.start, timeline.start) - timeline.start, min(span.end, timeline.end) - timeline.start, span.category)
        for span in spans
    ]
    works = [(start, end, category) for start, end, category in clipped if start < end]
    found: list[Stretch] = []
    for category in dict.fromkeys(category for _, _, category in sorted(works)):
        own = merge((start, end) for start, end, other in works if other == category)
        found = [*(rest for old in found for rest in _without(old, own)), *((category, *pair) for pair in own)]
    busy = merge((start, end) for start, end, _ in works)
    edges = [0.0, *(edge for pair in busy for edge in pair), timeline.end - timeline.start]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple(sorted((*found, *((IDLE, a, b) for a, b in gaps if a < b)), key=lambda stretch: stretch[1]))


def _without(stretch: Stretch, covered: Sequence[tuple[float, float]]) -> list[Stretch]:
    """Return the parts of a stretch that no other stretch covers."""
    category, start, end = stretch
    left = []
    for low, high in covered:
        if low < end and high > start:
            if start < low:
                left.append((category, start, low))
            start = high
    return [*left, (category, start, end)] if start < end else left


def _folded(rows: Sequence[DeviceRow], tolerance: float) -> list[DeviceRow]:
    folded: list[DeviceRow] = []
    for row in rows:
        if folded and _same(folded[-1].stretches, row.stretches, tolerance):
            folded[-1] = DeviceRow((*folded[-1].names, *row.names), folded[-1].stretches)
        else:
            folded.append(row)
    return folded


def _same(left: Sequence[Stretch], right: Sequence[Stretch], tolerance: float) -> bool:
    return len(left) == len(right) and all(
        a[0] == b[0] and abs(a[1] - b[1]) <= tolerance and abs(a[2] - b[2]) <= tolerance
        for a, b in zip(left, right, strict=True)
    )
