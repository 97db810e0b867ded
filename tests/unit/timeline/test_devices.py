"""The work of each device, in stretches of work and idle time; and the picture made of them."""

import re
from itertools import pairwise

import pytest
from synthetic import synthetic_timeline

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.devices import DeviceRow, device_rows, largest_idle
from verl_fuse.timeline.idle import idle_table
from verl_fuse.timeline.picture import picture


def test_stretches_cover_the_step_and_are_busy_as_long_as_the_idle_table_says():
    timeline = synthetic_timeline()
    seconds = timeline.end - timeline.start
    for row, table in zip(device_rows(timeline), idle_table(timeline).devices, strict=True):
        ends = [(0.0, 0.0), *((start, end) for _, start, end in row.stretches), (seconds, seconds)]
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(ends))
        assert sum(end - start for name, start, end in row.stretches if name != "idle") == pytest.approx(table.busy)


def test_what_began_later_is_shown():
    spans = (
        Span("request", "replica 0", "generate", 0.0, 6.0),
        Span("ref", "rank 0", "inference", 2.0, 3.0),
        Span("waits", "rank 0", "wait", 6.0, 8.0),
    )
    (row,) = device_rows(Timeline("run", 1, 0.0, 8.0, spans))
    assert row.stretches == (
        ("generate", 0.0, 2.0), ("inference", 2.0, 3.0), ("generate", 3.0, 6.0), ("idle", 6.0, 8.0),
    )  # fmt: skip


def test_many_devices_that_do_the_same_are_one_row():
    spans = [Span("update_actor", f"rank {rank}", "train", 0.0, 4.0 + 1e-3 * rank) for rank in range(8)]
    spans += [Span("update_actor", f"rank {rank}", "train", 0.0, 3.0) for rank in range(8, 12)]
    spans += [Span("request", f"replica {r}", "generate", 5.0, 9.0) for r in range(3)]
    rows = device_rows(Timeline("run", 1, 0.0, 10.0, tuple(spans)))
    assert [row.label for row in rows] == ["device 0 to 7", "device 8 to 11"]
    assert sum(len(row.names) for row in rows) == 12


def test_a_few_devices_that_do_the_same_have_a_row_each():
    spans = [Span("update_actor", f"rank {rank}", "train", 0.0, 4.0) for rank in range(8)]
    spans.append(Span("request", "replica 0", "generate", 5.0, 9.0))
    rows = device_rows(Timeline("run", 1, 0.0, 10.0, tuple(spans)))
    assert [row.label for row in rows] == [f"device {rank}" for rank in range(8)]


def test_a_step_that_does_not_say_its_devices_shows_replicas_and_ranks():
    spans = (Span("request", "replica 3", "generate", 0.0, 1.0), Span("ref", "rank 0", "inference", 1.0, 2.0))
    assert [row.label for row in device_rows(Timeline("run", 1, 0.0, 2.0, spans))] == ["replica 3", "rank 0"]


def test_the_picture_names_its_steps_and_draws_idle_time_and_no_markup_of_a_run():
    evil = "</svg><script>alert(1)</script>"
    drawn = picture([("stock", synthetic_timeline()), (evil, synthetic_timeline(seed=1))])
    assert 'class="idle"' in drawn
    assert "% idle" in drawn
    assert re.findall(r'<path class="train" stroke-width="18" d="(.+?)"', drawn)[0].count("M") == 4
    assert ">stock</tspan>" in drawn
    assert "<script" not in drawn
    assert drawn.count("</svg>") == 1


def test_the_largest_idle_stretch_counts_devices():
    alone = DeviceRow(("device 0",), (("idle", 0.0, 3.0), ("train", 3.0, 9.0)))
    many = DeviceRow(("device 1", "device 2"), (("train", 0.0, 5.0), ("idle", 5.0, 7.0), ("train", 7.0, 9.0)))
    assert largest_idle([alone, many]) == (many, 5.0, 7.0)
    assert largest_idle([alone]) == (alone, 0.0, 3.0)
    assert largest_idle([DeviceRow(("device 0",), (("train", 0.0, 9.0),))]) is None
