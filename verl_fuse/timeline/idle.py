"""Measures how busy each track and each device was during the step.

Invariants (tests/unit/timeline/test_idle.py):
- 0 <= busy <= window on every row, so the idle fraction lies in [0, 1];
- overlapping spans count once in `busy`, and time outside the step's window or in a "wait" span never counts;
- a device is busy whenever its replica, its slice or its rank is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_fuse.spec.timeline import CATEGORIES, RANK, REPLICA, SLICE, Span, Timeline, union_seconds
from verl_fuse.timeline.tracks import number, ordered_tracks, role, totals

BusyInterval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class IdleRow:
    """One track or device: `window` and `busy` in seconds; `concurrency` is the mean number of
    spans at once while busy."""

    track: str
    role: str
    window: float
    busy: float
    spans: int
    concurrency: float

    @property
    def idle_fraction(self) -> float:
        return 1.0 - self.busy / self.window if self.window else 0.0


@dataclass(frozen=True)
class IdleTable:
    """Rows per track, rows per device (empty where replicas and ranks do not pair up), and seconds per category
    over replicas and ranks."""

    rows: tuple[IdleRow, ...]
    devices: tuple[IdleRow, ...]
    categories: tuple[tuple[str, float], ...]

    def of(self, role: str) -> tuple[IdleRow, ...]:
        """Return the rows of one role: "step", "lane", "replica", "slice", "rank", "device" or "other"."""
        return self.devices if role == "device" else tuple(row for row in self.rows if row.role == role)

    def idle_fraction(self, role: str) -> float | None:
        """Return the idle share of all time of this role; None if the step has no such track."""
        return _idle_fraction(self.of(role))

    @property
    def overall(self) -> float | None:
        """Return the idle share of the devices; where the devices are not known, of all replica and rank tracks."""
        return _idle_fraction(self.devices or (*self.of(REPLICA), *self.of(RANK)))


def idle_table(timeline: Timeline) -> IdleTable:
    """Return busy seconds and idle fraction of every track of a step.

    Devices follow verl's colocated layout (verl/workers/rollout/replica.py, `init_hybrid`): with k
    ranks per replica, device r runs rank r, replica r // k and the slice of that number, where the step has slices.
    A span of a replica that names its devices (`first_device`, `devices`) is believed instead.
    """
    tracks = ordered_tracks(timeline)
    work = {
        track: _clip(timeline, (span for span in spans if span.category != "wait")) for track, spans in tracks.items()
    }
    rows = tuple(_row(track, role(track), timeline, intervals) for track, intervals in work.items())
    devices = tuple(
        _row(f"device {index}", "device", timeline, [*work.get(replica, []), *work.get(slice, []), *work[rank]])
        for index, (replica, slice, rank) in enumerate(device_tracks(tracks))
    )
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for track, spans in tracks.items():
        if role(track) in (REPLICA, SLICE, RANK):
            for category in (categories := {span.category for span in spans}):
                alone = len(categories) == 1 and category != "wait"
                found = work[track] if alone else _clip(timeline, (s for s in spans if s.category == category))
                seconds[category] += union_seconds(found)
    return IdleTable(rows, devices, tuple((name, value) for name, value in seconds.items() if value))


def average(tables: Sequence[IdleTable]) -> IdleTable:
    """Return totals over several steps: each track is weighed by the steps in which it appears."""
    return IdleTable(
        _sum_rows(row for table in tables for row in table.rows),
        _sum_rows(row for table in tables for row in table.devices),
        tuple(totals(amount for table in tables for amount in table.categories).items()),
    )


def device_tracks(tracks: Mapping[str, Sequence[Span]]) -> list[tuple[str, str, str]]:
    """Return the tracks of each device: replica and slice (which the device need not have), rank; empty where the step
    does not tell the devices of its replicas."""
    replicas, ranks = ([t for t in tracks if role(t) == kind] for kind in (REPLICA, RANK))
    placed = _placed(tracks)
    if placed:
        of = {rank: number(rank) for rank in ranks}
        homes = {rank: placed.get(index, "") for rank, index in of.items() if index is not None}
        return [(home, f"slice {number(home)}", rank) for rank, home in homes.items()]
    numbered = all([number(t) for t in group] == list(range(len(group))) for group in (replicas, ranks))
    if not replicas or not ranks or len(ranks) % len(replicas) or not numbered:
        return []
    per_replica = len(ranks) // len(replicas)
    return [(replicas[index // per_replica], f"slice {index // per_replica}", rank) for index, rank in enumerate(ranks)]


def _placed(tracks: Mapping[str, Sequence[Span]]) -> dict[int, str]:
    """Return the replica on each device, where spans name devices."""
    return {
        device: track
        for track, spans in tracks.items()
        if role(track) == REPLICA
        for span in spans
        if "first_device" in span.args
        for device in range(int(span.args["first_device"]), int(span.args["first_device"]) + int(span.args["devices"]))
    }


def _clip(timeline: Timeline, spans: Iterable[Span]) -> list[BusyInterval]:
    first, last = timeline.start, timeline.end
    clipped = (
        (span.start, span.end)
        if first <= span.start and span.end <= last
        else (max(span.start, first), min(span.end, last))
        for span in spans
    )
    return [(start, end) for start, end in clipped if start <= end]


def _row(track: str, kind: str, timeline: Timeline, intervals: list[BusyInterval]) -> IdleRow:
    window = timeline.end - timeline.start
    busy = min(union_seconds(intervals), window)
    total = sum(end - start for start, end in intervals)
    return IdleRow(track, kind, window, busy, len(intervals), total / busy if busy else 0.0)


def _sum_rows(rows: Iterable[IdleRow]) -> tuple[IdleRow, ...]:
    merged: dict[str, IdleRow] = {}
    for row in rows:
        old = merged.get(row.track)
        if old is None:
            merged[row.track] = row
            continue
        busy = old.busy + row.busy
        concurrency = (old.concurrency * old.busy + row.concurrency * row.busy) / busy if busy else 0.0
        merged[row.track] = IdleRow(
            row.track, row.role, old.window + row.window, busy, old.spans + row.spans, concurrency
        )
    return tuple(merged.values())


def _idle_fraction(rows: Sequence[IdleRow]) -> float | None:
    window = sum(row.window for row in rows)
    return 1.0 - sum(row.busy for row in rows) / window if window else None
