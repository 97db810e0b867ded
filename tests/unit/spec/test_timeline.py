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
        '{"format": 1, "run": "r", "step": Infinity, "start": 0, "end": 1, "spans": []}',
        '{"format": 1, "run": 5, "step": 1, "start": 0, "end": 1, "spans": []}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": 3}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1' + 400 * "0" + ', "spans": []}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": [["a", 7, "train", 0, 1, {}]]}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": [["a", null, "train", 0, 1, {}]]}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": [[null, "rank 0", "train", 0, 1, {}]]}',
        '{"format": 1, "run": "r", "step": 1, "start": 0, "end": 1, "spans": [["a", "rank 0", "train", 0, 1, null]]}',
    ],
    ids=[
        "empty",
        "list",
        "no keys",
        "no spans",
        "short span",
        "step in words",
        "endless step",
        "run by number",
        "spans by number",
        "huge end",
        "track by number",
        "no track",
        "no name",
        "no args",
    ],
)
def test_text_that_is_no_timeline_is_refused(text: str):
    with pytest.raises(FuseError, match="not a verl-fuse timeline"):
        Timeline.from_json(text)


@pytest.mark.parametrize("times", ["1, 1", "2, 1", "NaN, 1", "0, Infinity", "-1e308, 1e308"])
def test_a_step_of_no_length_is_refused(times: str):
    start, end = times.split(", ")
    with pytest.raises(FuseError, match=r"step 1: start .*, end .*; needs finite start < end"):
        Timeline.from_json(f'{{"format": 1, "run": "r", "step": 1, "start": {start}, "end": {end}, "spans": []}}')


def test_a_span_of_no_length_is_read():
    timeline = Timeline("run", 1, 0.0, 1.0, (Span("adv", "step", "stage", 0.5, 0.5),))
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize("tokens", ["x", math.nan, None, -1, 1.5, 10**30])
def test_tokens_that_cannot_be_counted_are_refused(tokens: object):
    span = Span("request", "replica 0", "generate", 0.0, 1.0, {"response_tokens": tokens})  # type: ignore[dict-item]
    with pytest.raises(
        FuseError, match=r"span 'request' on 'replica 0': response_tokens=.*; needs a whole number from 0 to"
    ):
        Timeline.from_json(Timeline("run", 1, 0.0, 1.0, (span,)).to_json())


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
