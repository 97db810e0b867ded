import math
import time

import pytest
from rollouts import PROMPT, generated, timeline

from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import Span
from verl_fuse.timeline.decode import admitted, decode_cost
from verl_fuse_interstage.measured import (
    InferenceCost,
    inference_cost,
    migration_seconds,
    stage_seconds,
    streaming_metrics,
)

LENGTHS = [10, 200, 40, 80, 15, 120, 30, 60, 25, 90, 12, 300]


@pytest.mark.parametrize("slots", [4, 64])
def test_the_costs_a_rollout_was_made_with_are_found_again(slots):
    spans = [s for replica in (0, 1) for s in generated(LENGTHS[replica::2], slots, 0.02, 0.003, replica)]
    cost = decode_cost(timeline(*spans), Capacity(slots))
    assert cost.step == pytest.approx(0.02, rel=0.05)
    assert cost.sequence == pytest.approx(0.003, rel=0.1)


def test_time_in_the_queue_is_not_decoding():
    spans = generated([10, 10, 10, 10], slots=2, step=0.1, sequence=0.0)
    starts, ends = admitted(spans, Capacity(2))
    assert starts.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-5)
    assert ends.tolist() == pytest.approx([1.0, 1.0, 2.0, 2.0])
    cost = decode_cost(timeline(*spans), Capacity(2))
    assert cost.step + cost.sequence * 2 == pytest.approx(0.1)


# What a KV cache of two sequences of 16384 tokens held of real ones; the seconds are those of a replica on one core.
LIMIT, STEP, SEQUENCE = 16384, 0.01, 0.0002
SHORT = [8 + 37 * n % 233 for n in range(48)]


@pytest.mark.parametrize("tokens", [math.inf, 2 * (PROMPT + LIMIT), 2000])
def test_the_limit_of_a_response_plays_no_part(tokens):
    spans = [s for replica in (0, 1) for s in generated(SHORT[replica::2], 64, STEP, SEQUENCE, replica, tokens)]
    cost = decode_cost(timeline(*spans), Capacity(64, tokens))
    assert (cost.step, cost.sequence) == (pytest.approx(STEP, rel=0.1), pytest.approx(SEQUENCE, rel=0.1))


def request(start, end, tokens):
    return Span("request", "replica 0", "generate", start, end, {"prompt_tokens": 200, "response_tokens": tokens})


def test_waiting_for_room_in_the_kv_cache_is_not_decoding():
    tokens = 2 * (PROMPT + 2)
    spans = generated([2, 2, 2, 2], slots=8, step=0.1, sequence=0.0, tokens=tokens)
    starts, _ = admitted(spans, Capacity(8, tokens))
    assert starts.tolist() == pytest.approx([0.0, 0.0, 0.2, 0.2], abs=1e-5)


def test_a_cache_that_a_prompt_would_fill_to_the_last_token_has_no_room_for_it():
    both = [request(0.0, 1.0, 10), request(0.0, 2.0, 10)]
    assert admitted(both, Capacity(8, 400))[0].tolist() == [0.0, 1.0]
    assert admitted(both, Capacity(8, 401))[0].tolist() == [0.0, 0.0]
    shared = [Span(s.name, s.track, s.category, s.start, s.end, {**s.args, "cached_tokens": 1}) for s in both]
    assert admitted(shared, Capacity(8, 400))[0].tolist() == [0.0, 0.0], "a cached prefix takes no room of its own"


def test_thousands_of_requests_of_a_step_are_sorted_out_in_seconds():
    """A trainer does this between two steps."""
    lengths = [100 + 37 * n % 3900 for n in range(4096)]
    spans = [request(0.0, 1.0 + n * 0.05 + length * 0.01, length) for n, length in enumerate(lengths)]
    begun = time.process_time()
    starts, ends = admitted(spans, Capacity(1024, 1e6))
    assert time.process_time() - begun < 3.0
    assert len({*starts.tolist()}) > 100
    assert (starts <= ends).all()


def test_requests_that_ran_alike_give_their_mean_pace():
    cost = decode_cost(timeline(*generated([50] * 4, slots=8, step=0.02, sequence=0.001)), Capacity(8))
    assert cost.step + 4 * cost.sequence == pytest.approx(0.024, rel=1e-4)


def test_a_request_that_was_turned_away_is_left_out():
    refused = Span("request", "replica 0", "generate", 0.0, 5.0, {"prompt_tokens": 9, "response_tokens": 0})
    assert decode_cost(timeline(refused), Capacity(8)) is None
    assert decode_cost(timeline(), Capacity(8)) is None


def lane(track, start, end, **args):
    return Span("micro-group", track, "inference", start, end, args)


def test_a_slice_costs_the_devices_of_one_replica_and_the_training_workers_all():
    spans = [
        lane("lane slice 0", 0.0, 3.0, micro_group=0, samples=4),
        lane("lane slice 1", 2.0, 3.0, micro_group=1, samples=4),
        lane("lane train", 3.0, 3.5),
        Span("update_actor", "lane train", "train", 4.0, 9.0),
        # No freed replica takes part in it.
        lane("lane critic", 0.0, 9.0, micro_group="critic 0", samples=0),
    ]
    assert inference_cost(timeline(*spans), replicas=2, tokens=500) == InferenceCost(per_token=0.01, group=2.0)


def test_without_micro_groups_inference_was_not_measured():
    assert inference_cost(timeline(lane("lane train", 0.0, 3.0)), replicas=2, tokens=500) is None


def test_the_slowest_replica_counts_for_a_migration():
    stops = [Span("migrate", f"replica {r}", "other", 1.0, end) for r, end in ((0, 1.2), (1, 1.5))]
    assert migration_seconds(timeline(*stops)) == pytest.approx(0.5)
    assert migration_seconds(timeline()) is None


def test_inference_beside_generation_is_hidden_and_a_sample_counts_once():
    spans = [
        lane("lane slice 0", 1.0, 3.0, micro_group=0, samples=4),
        lane("lane slice 0", 4.0, 6.0, micro_group=1, samples=0),
        lane("lane train", 4.5, 5.5, micro_group=2, samples=3),
        lane("lane train", 5.5, 6.0, micro_group=2, samples=3),
        Span("request", "replica 0", "generate", 0.0, 5.0, {"response_tokens": 9}),
    ]
    assert streaming_metrics(timeline(*spans)) == {
        "fuse/overlap_seconds": 3.0,
        "fuse/overlap_fraction": 0.75,
        "fuse/streamed_samples": 7.0,
    }


def test_the_stage_ends_with_the_last_inference():
    request = generated([10], 1, 0.1, 0.0)
    assert stage_seconds(timeline(*request, lane("lane slice 0", 1.0, 4.0), lane("lane train", 4.0, 4.5))) == 4.5
    assert stage_seconds(timeline(*request)) is None
    trained = timeline(*request, Span("update_actor", "step", "stage", 4.0, 6.0))
    assert (stage_seconds(trained), stage_seconds(trained, update=True)) == (None, 6.0)
    assert decode_cost(timeline(*request), Capacity(1)).step == pytest.approx(0.1)
