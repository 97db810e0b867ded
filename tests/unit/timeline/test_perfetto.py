"""Trace events that Perfetto and chrome://tracing open."""

import json
from itertools import pairwise
from typing import Any

from synthetic import synthetic_timeline

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.perfetto import to_perfetto


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(to_perfetto(timeline))["traceEvents"] if event["ph"] == phase]


def test_overlapping_requests_go_to_sub_threads():
    spans = (
        Span("r0", "replica 0", "generate", 100.5, 102.0, {"response_tokens": 7}),
        Span("r1", "replica 0", "generate", 101.0, 101.25),
    )
    trace = json.loads(to_perfetto(Timeline("run", 4, 100.0, 103.0, spans)))
    assert trace["otherData"] == {"run": "run", "step": 4, "step_start_unix_seconds": 100.0}
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "replica 0"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 1}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "replica 0"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 0}},
        {"ph": "X", "name": "r0", "cat": "generate", "pid": 1, "tid": 1, "ts": 5e5, "dur": 1.5e6,
         "args": {"response_tokens": 7}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "replica 0 #2"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 2, "args": {"sort_index": 1}},
        {"ph": "X", "name": "r1", "cat": "generate", "pid": 1, "tid": 2, "ts": 1e6, "dur": 2.5e5, "args": {}},
    ]  # fmt: skip


def test_every_span_is_there_once_and_threads_never_overlap():
    timeline = synthetic_timeline(replicas=8, ranks=8, requests=512)
    drawn = events(timeline, "X")
    assert sorted(event["name"] for event in drawn) == sorted(span.name for span in timeline.spans)
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in drawn:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len({thread for _, thread in threads}) == len(threads)
    for row in threads.values():
        # Perfetto reads whole nanoseconds.
        times = sorted((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)) for event in row)
        assert all(left[1] <= right[0] for left, right in pairwise(times))


def test_processes_are_named_after_tracks_in_reading_order():
    named = [event["args"]["name"] for event in events(synthetic_timeline(), "M") if event["name"] == "process_name"]
    assert named == ["step", "lane train", "replica 0", "replica 1", "rank 0", "rank 1"]
