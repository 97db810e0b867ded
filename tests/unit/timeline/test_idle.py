"""The idle table, on numbers that can be checked by hand."""

import pytest
from synthetic import synthetic_timeline

from verl_fuse.spec.timeline import Category, Span, Timeline
from verl_fuse.timeline.idle import average, idle_table


def timeline(*spans: tuple[str, Category, float, float], end: float = 10.0) -> Timeline:
    return Timeline(
        "run", 1, 0.0, end, tuple(Span("s", track, kind, start, stop) for track, kind, start, stop in spans)
    )


def test_overlapping_requests_count_once_and_give_the_concurrency():
    (row,) = idle_table(timeline(("replica 0", "generate", 0, 4), ("replica 0", "generate", 2, 5))).rows
    assert (row.window, row.busy, row.spans, row.concurrency) == (10.0, 5.0, 2, 7 / 5)
    assert row.idle_fraction == 0.5


def test_waiting_and_time_outside_the_step_are_idle():
    (row,) = idle_table(timeline(("rank 0", "wait", 0, 8), ("rank 0", "train", -3, 1), ("rank 0", "train", 9, 12))).rows
    assert (row.busy, row.idle_fraction) == (2.0, 0.8)


def test_a_device_is_busy_when_its_replica_or_its_rank_is():
    table = idle_table(
        timeline(
            ("replica 0", "generate", 0, 4), ("rank 0", "train", 3, 6), ("rank 1", "train", 8, 9),
        )
    )  # fmt: skip
    assert [(row.track, row.busy) for row in table.devices] == [("device 0", 6.0), ("device 1", 5.0)]
    assert table.idle_fraction("device") == table.overall == pytest.approx(0.45)


def test_a_device_is_busy_when_its_slice_is():
    spans = [(f"rank {rank}", "train", 8, 9) for rank in range(4)]
    spans += [("replica 0", "generate", 0, 2), ("replica 1", "generate", 0, 5), ("slice 0", "inference", 3, 5)]
    table = idle_table(timeline(*spans))
    assert [row.busy for row in table.devices] == [5.0, 5.0, 6.0, 6.0]


def test_a_replica_of_two_ranks_keeps_both_devices_busy():
    ranks = [(f"rank {index}", "train", 8, 9) for index in range(4)]
    table = idle_table(timeline(("replica 0", "generate", 0, 6), ("replica 1", "generate", 0, 2), *ranks))
    assert [row.busy for row in table.devices] == [7.0, 7.0, 3.0, 3.0]


def test_replicas_that_name_their_devices_are_believed():
    spans = [
        Span("request", "replica 0", "generate", 0.0, 6.0, {"first_device": 2, "devices": 2}),
        Span("request", "replica 1", "generate", 0.0, 2.0, {"first_device": 0, "devices": 2}),
        *(Span("update_actor", f"rank {rank}", "train", 8.0, 9.0) for rank in range(4)),
        Span("old_log_prob", "slice 1", "inference", 3.0, 4.0),
    ]
    table = idle_table(Timeline("run", 1, 0.0, 10.0, tuple(spans)))
    assert [row.busy for row in table.devices] == [4.0, 4.0, 7.0, 7.0]


@pytest.mark.parametrize(
    "tracks",
    [
        ("replica 0", "replica 1", "rank 0"),
        ("replica 0", "replica 1", "rank 0", "rank 1", "rank 2"),
        ("replica 1", "rank 0"),
        ("rank 0",),
    ],
    ids=["fewer ranks", "no whole number of ranks per replica", "not numbered from 0", "no replicas"],
)  # fmt: skip
def test_without_a_pairing_the_overall_figure_is_over_tracks(tracks: tuple[str, ...]):
    table = idle_table(timeline(*((track, "train", 0, 5) for track in tracks)))
    assert table.devices == ()
    assert table.overall == 0.5


def test_no_device_tracks_means_no_figure():
    table = idle_table(timeline(("step", "stage", 0, 5)))
    assert table.overall is None
    assert table.idle_fraction("rank") is None
    assert table.idle_fraction("step") == 0.5


def test_categories_sum_device_seconds_and_leave_the_driver_out():
    table = idle_table(
        timeline(
            ("rank 0", "train", 0, 2),
            ("rank 1", "train", 1, 4),
            ("replica 0", "generate", 0, 3),
            ("slice 0", "inference", 3, 4),
            ("slice 0", "wait", 4, 9),
            ("step", "stage", 0, 9),
        )
    )
    assert table.categories == (("generate", 3.0), ("inference", 1.0), ("train", 5.0), ("wait", 5.0))


def test_a_step_of_no_length_divides_by_nothing():
    assert idle_table(timeline(("rank 0", "train", 0, 0), end=0.0)).rows[0].idle_fraction == 0.0


def test_every_fraction_lies_between_none_and_all():
    table = idle_table(synthetic_timeline(replicas=8, ranks=8, requests=256))
    assert len(table.rows) == 18
    assert len(table.devices) == 8
    assert all(0 <= row.busy <= row.window and 0 <= row.idle_fraction <= 1 for row in (*table.rows, *table.devices))


def test_average_weighs_steps_by_their_length():
    short = idle_table(timeline(("rank 0", "train", 0, 10)))
    long = idle_table(
        timeline(("rank 0", "train", 0, 5), ("rank 0", "train", 0, 5), ("rank 1", "sync", 0, 3), end=30.0)
    )
    table = average([short, long])
    assert [(row.track, row.window, row.busy, row.spans) for row in table.rows] == [
        ("rank 0", 40.0, 15.0, 3),
        ("rank 1", 30.0, 3.0, 1),
    ]
    assert table.rows[0].concurrency == pytest.approx(20 / 15)
    assert table.categories == (("train", 15.0), ("sync", 3.0))
