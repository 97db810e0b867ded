"""Spans, timelines, and the arithmetic of intervals."""

import math

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import CATEGORIES, Span, Timeline, merge, overlap_seconds, union_seconds


def test_spans_are_sorted_by_track_and_time():
    late, early = Span("b", "rank 0", "train", 2.0, 3.0), Span("a", "rank 0", "train", 1.0, 2.0)
    first = Span("c", "lane train", "train", 5.0, 6.0)
    timeline = Timeline("run", 1, 0.0, 9.0, (late, first, early))
    assert timeline.spans == (first, early, late)
    assert timeline.tracks == ("lane train", "rank 0")
    assert timeline.on("rank 0") == (early, late)


def test_json_round_trip_keeps_everything():
    spans = tuple(Span(f"s{i}", "rank 0", c, i, i + 0.125, {"tokens": i}) for i, c in enumerate(CATEGORIES))  # type: ignore[arg-type]
    timeline = Timeline("a run", 7, 0.5, 20.25, spans)
    back = Timeline.from_json(timeline.to_json())
    assert back == timeline
    assert [dict(span.args) for span in back.spans] == [{"tokens": i} for i in range(len(CATEGORIES))]


@pytest.mark.parametrize("times", [(2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_impossible_times_are_refused(times: tuple[float, float]):
    with pytest.raises(FuseError, match=r"span 'gen' on 'step': start .*; need finite start <= end"):
        Span("gen", "step", "stage", *times)


def test_an_unknown_category_is_refused_with_the_known_ones():
    with pytest.raises(FuseError, match=r"category 'sleep'; allowed: generate, reward, inference"):
        Span("gen", "step", "sleep", 0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": [["a", "b"]]}',
        '{"format": 1, "run": "r", "step": "x", "start": 0, "end": 1, "spans": []}',
    ],
    ids=["empty", "list", "no keys", "no spans", "short span", "step in words"],
)
def test_text_that_is_no_timeline_is_refused(text: str):
    with pytest.raises(FuseError, match="not a verl-fuse timeline"):
        Timeline.from_json(text)


def test_another_format_is_refused_by_number():
    with pytest.raises(FuseError, match="timeline format 2; this version reads 1"):
        Timeline.from_json('{"format": 2}')


def test_merge_joins_what_touches():
    assert merge([(4, 5), (0, 1), (1, 2), (1.5, 1.75)]) == [(0, 2), (4, 5)]


def test_union_counts_overlap_once():
    assert union_seconds([(0, 2), (1, 3), (10, 11)]) == 4


def test_overlap_needs_both():
    assert overlap_seconds([(0, 4), (2, 6)], [(5, 8), (9, 10)]) == 1
    assert overlap_seconds([], [(0, 1)]) == 0
