"""A step in a few numbers."""

import dataclasses
import json

import pytest
from synthetic import synthetic_timeline

from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.summary import StepSummary, summarize


def test_the_long_tail_is_what_is_left_after_80_per_cent_of_the_requests():
    ends = [1, 2, 3, 4, 5, 6, 7, 8, 9, 20]
    spans = tuple(Span(f"r{end}", f"replica {end % 2}", "generate", 0.0, end) for end in ends)
    summary = summarize(Timeline("run", 1, -1.0, 30.0, spans))
    assert (summary.requests, summary.generation_seconds, summary.long_tail_fraction) == (10, 20.0, 12 / 20)


def test_a_request_that_moved_counts_once():
    parts = [
        ("replica 0", 0.0, 4.0, "aborted"),
        ("replica 1", 4.0, 9.0, "completed"),
        ("replica 1", 1.0, 5.0, "completed"),
    ]
    requests = [Span("r", track, "generate", start, end, {"stop_reason": why}) for track, start, end, why in parts]
    spans = (*requests, Span("migrate", "replica 0", "other", 4.0, 9.5))
    summary = summarize(Timeline("run", 1, 0.0, 10.0, spans))
    assert (summary.requests, summary.generation_seconds, summary.long_tail_fraction) == (2, 9.0, 0.0)


def test_overlap_is_lane_inference_inside_the_stage_gen():
    spans = (
        Span("gen", "step", "stage", 0.0, 10.0),
        Span("ref", "lane train", "inference", 8.0, 12.0),
        Span("ref", "rank 0", "inference", 8.0, 12.0),
        Span("update_actor", "lane train", "train", 12.0, 15.0),
    )
    summary = summarize(Timeline("run", 1, 0.0, 15.0, spans))
    assert (summary.inference_seconds, summary.overlap_seconds) == (4.0, 2.0)


def test_stages_keep_their_order_and_repeated_ones_add_up():
    spans = [Span(name, "step", "stage", at, at + 1.5) for name, at in [("values", 5.0), ("gen", 0.0), ("values", 7.0)]]
    assert summarize(Timeline("run", 1, 0.0, 10.0, tuple(spans))).stages == (("gen", 1.5), ("values", 3.0))


def test_a_stage_says_what_was_planned_and_all_that_it_took():
    spans = (
        Span("gen", "step", "stage", 0.0, 4.0, {"planned_seconds": 3.0}),
        Span("gen", "step", "stage", 5.0, 6.0),
        Span("update_critic", "lane critic", "train", 1.0, 3.0, {"planned_seconds": 2.5}),
        Span("sleep", "step", "stage", 6.0, 7.0),
    )
    planned = summarize(Timeline("run", 1, 0.0, 10.0, spans)).planned
    assert planned == (("gen", 3.0, 5.0), ("update_critic", 2.5, 2.0))


def test_what_the_timeline_cannot_give_is_none():
    summary = summarize(Timeline("run", 1, 0.0, 2.0, ()))
    assert summary == StepSummary(1, 2.0, (), 0, None, None, None, None, {}, None)


def test_requests_of_no_length_have_no_tail():
    summary = summarize(Timeline("run", 1, 0.0, 2.0, (Span("r", "replica 0", "generate", 1.0, 1.0),)))
    assert (summary.generation_seconds, summary.long_tail_fraction) == (0.0, None)


def test_a_summary_survives_json():
    timeline = synthetic_timeline()
    said = Span("gen", "step", "stage", timeline.start, timeline.end, {"planned_seconds": 1.0})
    summary = summarize(dataclasses.replace(timeline, spans=(*timeline.spans, said)))
    assert summary.planned
    assert StepSummary.from_dict(json.loads(json.dumps(dataclasses.asdict(summary)))) == summary
    assert sorted(summary.idle) == ["device", "rank", "replica"]


@pytest.mark.parametrize("data", [{}, [], {"step": 1}], ids=["empty", "list", "one key"])
def test_anything_else_is_refused(data):
    with pytest.raises(FuseError, match=r"step summary.*(missing|needs a block with keys) (step, )?seconds, stages"):
        StepSummary.from_dict(data)
