from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.warm import WarmTracks


def step(*tracks: str) -> Timeline:
    """Return a step in which these tracks work, a replica is parked, and the driver's stage "gen" takes all of it."""
    kind = {"replica": "generate", "lane": "inference"}
    spans = [Span("work", track, kind[track.split()[0]], 0.0, 5.0) for track in tracks]  # type: ignore[arg-type]
    spans += [Span("gen", "step", "stage", 0.0, 9.0), Span("migrate", "replica 9", "other", 1.0, 2.0)]
    spans += [Span("update_actor", "lane train", "train", 8.0, 9.0), Span("forward", "rank 0", "train", 8.0, 9.0)]
    return Timeline("run", 1, 0.0, 9.0, tuple(spans))


def test_a_replica_counts_from_its_second_step_on():
    warm = WarmTracks()
    assert "replica 0" not in warm.of(step("replica 0")).tracks
    assert warm.of(step("replica 0", "replica 1")).tracks == ("lane train", "rank 0", "replica 0", "step")
    assert "replica 1" in warm.of(step("replica 1")).tracks


def test_to_be_parked_is_no_work():
    warm = WarmTracks()
    warm.of(step())
    assert "replica 9" not in warm.of(step()).tracks
    assert "replica 9" not in warm.of(step("replica 9")).tracks
    assert "replica 9" in warm.of(step()).tracks


def test_one_cold_lane_hides_the_work_of_all():
    warm = WarmTracks()
    assert not [track for track in warm.of(step("lane slice 0")).tracks if track.startswith("lane")]
    assert "lane slice 0" in warm.of(step("lane slice 0")).tracks
    assert not [track for track in warm.of(step("lane slice 0", "lane slice 1")).tracks if track.startswith("lane")]
    assert "lane slice 1" in warm.of(step("lane slice 0", "lane slice 1")).tracks
    assert "lane slice 0" in warm.of(step("lane slice 0")).tracks


def test_the_driver_and_the_ranks_always_count():
    assert {"step", "rank 0"} <= set(WarmTracks().of(step("lane slice 0")).tracks)
    assert WarmTracks().of(step()).end == 9.0
