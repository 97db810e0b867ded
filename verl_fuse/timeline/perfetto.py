"""Writes Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", JSON object form, complete events (ph X) and metadata events (ph M).

Invariants (tests/unit/timeline/test_perfetto.py):
- one process per track and one thread per sub-row, so that spans of one thread never overlap;
- thread ids are unique in the whole trace; times are microseconds since the step began.
"""

import json
from typing import Any

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.tracks import ordered_tracks, pack


def to_perfetto(timeline: Timeline) -> str:
    """Write one step as trace-event JSON."""
    events: list[dict[str, Any]] = []
    thread = 0
    for process, (track, spans) in enumerate(ordered_tracks(timeline).items(), start=1):
        events += [
            _metadata("process_name", process, 0, name=track),
            _metadata("process_sort_index", process, 0, sort_index=process),
        ]
        for index, row in enumerate(pack(spans)):
            thread += 1
            events += [
                _metadata("thread_name", process, thread, name=track if index == 0 else f"{track} #{index + 1}"),
                _metadata("thread_sort_index", process, thread, sort_index=index),
            ]
            for span in row:
                # Whole nanoseconds, so that rounding cannot make neighbours overlap.
                start, end = (round((time - timeline.start) * 1e9) for time in (span.start, span.end))
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.category,
                        "pid": process,
                        "tid": thread,
                        "ts": start / 1000,
                        "dur": (end - start) / 1000,
                        "args": dict(span.args),
                    }
                )
    other = {"run": timeline.run, "step": timeline.step, "step_start_unix_seconds": timeline.start}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events})


def _metadata(kind: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
