import pytest
from rollouts import generated, timeline

from verl_fuse.spec.timeline import Span
from verl_fuse.timeline.decode import admitted, decode_cost
from verl_fuse_interstage.measured import InferenceCost, inference_cost, migration_seconds, stage_seconds

LENGTHS = [10, 200, 40, 80, 15, 120, 30, 60, 25, 90, 12, 300]


@pytest.mark.parametrize("slots", [4, 64])
def test_the_costs_a_rollout_was_made_with_are_found_again(slots):
    spans = [s for replica in (0, 1) for s in generated(LENGTHS[replica::2], slots, 0.02, 0.003, replica)]
    cost = decode_cost(timeline(*spans), slots)
    assert cost.step == pytest.approx(0.02, rel=0.05)
    assert cost.sequence == pytest.approx(0.003, rel=0.1)


def test_time_in_the_queue_is_not_decoding():
    spans = generated([10, 10, 10, 10], slots=2, step=0.1, sequence=0.0)
    starts, ends = admitted(spans, slots=2)
    assert starts.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-5)
    assert ends.tolist() == pytest.approx([1.0, 1.0, 2.0, 2.0])
    assert decode_cost(timeline(*spans), 2).step + decode_cost(timeline(*spans), 2).sequence * 2 == pytest.approx(0.1)


def test_requests_that_ran_alike_give_their_mean_pace():
    cost = decode_cost(timeline(*generated([50] * 4, slots=8, step=0.02, sequence=0.001)), 8)
    assert cost.step + 4 * cost.sequence == pytest.approx(0.024, rel=1e-4)


def test_a_request_that_was_turned_away_is_left_out():
    refused = Span("request", "replica 0", "generate", 0.0, 5.0, {"prompt_tokens": 9, "response_tokens": 0})
    assert decode_cost(timeline(refused), 8) is None
    assert decode_cost(timeline(), 8) is None


def lane(track, start, end, **args):
    return Span("micro-group", track, "inference", start, end, args)


def test_a_slice_costs_the_devices_of_one_replica_and_the_training_workers_all():
    spans = [
        lane("lane slice 0", 0.0, 3.0, micro_group=0, samples=4),
        lane("lane slice 1", 2.0, 3.0, micro_group=1, samples=4),
        lane("lane train", 3.0, 3.5),
        Span("update_actor", "lane train", "train", 4.0, 9.0),
    ]
    assert inference_cost(timeline(*spans), replicas=2, tokens=500) == InferenceCost(per_token=0.01, group=2.0)


def test_without_micro_groups_inference_was_not_measured():
    assert inference_cost(timeline(lane("lane train", 0.0, 3.0)), replicas=2, tokens=500) is None


def test_the_slowest_replica_counts_for_a_migration():
    stops = [Span("migrate", f"replica {r}", "other", 1.0, end) for r, end in ((0, 1.2), (1, 1.5))]
    assert migration_seconds(timeline(*stops)) == pytest.approx(0.5)
    assert migration_seconds(timeline()) is None


def test_the_stage_ends_with_the_last_inference():
    request = generated([10], 1, 0.1, 0.0)
    assert stage_seconds(timeline(*request, lane("lane slice 0", 1.0, 4.0), lane("lane train", 4.0, 4.5))) == 4.5
    assert stage_seconds(timeline(*request)) is None
    assert decode_cost(timeline(*request), 1).step == pytest.approx(0.1)
