"""Order and sub-rows of tracks."""

from itertools import pairwise

import pytest
from synthetic import synthetic_timeline

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.tracks import number, ordered_tracks, pack, role


def spans_on(*tracks: str) -> tuple[Span, ...]:
    return tuple(Span("s", track, "other", 0.0, 1.0) for track in tracks)


def test_tracks_come_in_reading_order_and_by_number():
    spans = spans_on(
        "rank 10", "rank 2", "reward", "slice 0", "replica 1", "replica 0", "lane train", "step", "rank node-a"
    )
    assert list(ordered_tracks(Timeline("run", 1, 0.0, 1.0, spans))) == [
        "step", "lane train", "replica 0", "replica 1", "slice 0", "rank 2", "rank 10", "rank node-a", "reward",
    ]  # fmt: skip


def test_a_plan_comes_right_after_its_rank():
    spans = spans_on("plan 1", "rank 1", "plan 0", "rank 0", "reward")
    assert list(ordered_tracks(Timeline("run", 1, 0.0, 1.0, spans))) == [
        "rank 0", "plan 0", "rank 1", "plan 1", "reward",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("track", "kind", "index"),
    [("step", "step", None), ("rank 3", "rank", 3), ("ranks", "other", None), ("replica x", "replica", None)],
)
def test_role_and_number(track: str, kind: str, index: int | None):
    assert (role(track), number(track)) == (kind, index)


def test_pack_reads_like_the_picture():
    a, b, c, d = (
        Span(n, "replica 0", "generate", s, e) for n, s, e in [("a", 0, 4), ("b", 1, 2), ("c", 2, 5), ("d", 4, 6)]
    )
    assert [[span.name for span in row] for row in pack([d, c, b, a])] == [["a", "d"], ["b", "c"]]


def test_sub_rows_never_overlap_and_are_as_few_as_possible():
    for spans in ordered_tracks(synthetic_timeline()).values():
        rows = pack(spans)
        assert sorted(span.name for row in rows for span in row) == sorted(span.name for span in spans)
        for row in rows:
            assert all(left.end <= right.start for left, right in pairwise(row))
        at_once = max(sum(other.start <= span.start < other.end for other in spans) for span in spans)
        assert len(rows) == at_once
