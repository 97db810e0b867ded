import time

import pytest

from verl_fuse.host.record.spans import Recorder, SpanCollector
from verl_fuse.spec.timeline import Span


def test_a_block_becomes_a_span_with_its_args():
    spans = []
    with Recorder(spans.append).span("ref", "rank 0", "inference", samples=4) as args:
        args["tokens"] = 9
    assert [(s.name, s.track, s.category, dict(s.args)) for s in spans] == [
        ("ref", "rank 0", "inference", {"samples": 4, "tokens": 9})
    ]


def test_a_failing_block_is_recorded_and_raises_its_own_error():
    spans = []
    with pytest.raises(KeyError), Recorder(spans.append).span("ref", "rank 0", "inference"):
        raise KeyError("x")
    assert spans[0].args["error"] == "KeyError"


def test_a_wall_clock_set_back_neither_fails_nor_shortens_what_it_measures(monkeypatch):
    spans = []
    with Recorder(spans.append).span("update_actor", "rank 0", "train"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
    assert spans[0].end >= spans[0].start > 1e9


def test_spans_are_handed_over_once_with_the_node_whose_clock_they_have():
    collector = SpanCollector()
    span = Span("ref", "rank 0", "inference", 1.0, 2.0)
    collector.add(span, "node 1")
    assert collector.drain() == [(span, "node 1")]
    assert collector.drain() == []


def test_requests_that_cannot_move_are_counted_by_server_while_they_are_in_flight():
    collector = SpanCollector()
    for server in ("a", "b", "a"):
        collector.hold(server)
    collector.let_go("b")
    assert collector.unmovable() == {"a": 2}
    collector.let_go("a")
    assert collector.unmovable() == {"a": 1}
