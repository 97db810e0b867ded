"""Simulated steps as timelines."""

import numpy as np
import pytest
from setups import NO_POLL, h100, ppo

from verl_fuse.simulate.options import SIMULATED_STRATEGIES, features_of
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.timeline.idle import idle_table
from verl_fuse.timeline.summary import summarize


@pytest.fixture(scope="module")
def steps() -> dict:
    cost, workload = h100(), ppo()
    plan = stock_plan(workload, cost, NO_POLL)
    return {
        name: simulate_step(workload, plan, cost, name, np.random.default_rng(0), NO_POLL)
        for name in ("stock", "interstage", "interstage+pipeline+scaling")
    }


def test_every_sample_has_a_span(steps):
    spans = [span for span in steps["stock"].spans.spans if span.category == "generate"]
    assert len(spans) == 256
    assert all(span.start == 0 for span in spans)


def test_a_moved_sample_has_two(steps):
    result = steps["interstage"]
    spans = [span for span in result.spans.spans if span.category == "generate"]
    moved = [span for span in spans if span.args["stop_reason"] == "aborted"]
    assert len(spans) == 256 + len(moved)
    assert len(moved) == result.generation.fused.moved > 0
    for span in moved:
        (rest,) = [other for other in spans if other.name == span.name and other is not span]
        assert rest.start == span.end
        assert rest.track != span.track
        assert rest.args["resumed_tokens"] == span.args["response_tokens"]
        assert rest.args["prompt_tokens"] == span.args["prompt_tokens"] + span.args["response_tokens"]


def test_summary_and_simulation_agree(steps):
    for result in steps.values():
        summary = summarize(result.spans)
        assert summary.seconds == pytest.approx(result.seconds)
        assert dict(summary.stages) == pytest.approx({k: v for k, v in result.stages.items() if v > 0})


def test_freed_replicas_show_their_inference(steps):
    lanes = [track for track in steps["interstage"].spans.tracks if track.startswith("lane slice")]
    generation = steps["interstage"].generation
    assert len(lanes) == generation.replicas - len(generation.fused.survivors)
    assert not [track for track in steps["stock"].spans.tracks if track.startswith("lane slice")]


def test_every_rank_trains(steps):
    ranks = {span.track for span in steps["stock"].spans.spans if span.name == "update_actor" and "rank" in span.track}
    assert ranks == {f"rank {rank}" for rank in range(16)}


@pytest.mark.parametrize("strategy", [name for name in SIMULATED_STRATEGIES if "speculation" not in features_of(name)])
def test_simulate_and_trace_find_the_same_idle_share(strategy):
    cost, workload = h100(), ppo()
    plan = stock_plan(workload, cost, NO_POLL)
    result = simulate_step(workload, plan, cost, strategy, np.random.default_rng(0), NO_POLL)
    assert result.idle == pytest.approx(idle_table(result.spans).overall)


def test_a_replica_without_a_sample_is_idle_and_its_devices_are_known(steps):
    generation = steps["stock"].generation
    assert {s.track for s in steps["stock"].spans.spans if "devices" in s.args} == {
        f"replica {r}" for r in range(generation.replicas)
    }
    assert len(idle_table(steps["stock"].spans).devices) == 16
