"""Generation under features."""

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.simulate.draw import draw
from verl_fuse.simulate.generation import GenerationResult, generate
from verl_fuse.simulate.stock import stock_plan


def run(workload, *features: str, takeover: bool = True) -> GenerationResult:
    cost = h100()
    plan = stock_plan(workload, cost, NO_POLL)
    lengths = draw(workload, np.random.default_rng(0), 0.8)
    calls = tuple(call for call in workload.calls if call.kind == "infer") if takeover else ()
    return generate(workload, plan, cost, frozenset(features), lengths, calls, NO_POLL)


def test_without_features_nothing_is_inferred():
    result = run(ppo())
    assert result.inference_end is None
    assert result.end == result.fused.rollout.seconds
    assert result.held == result.replicas * result.end


def test_freed_replicas_infer_and_then_go_back():
    kept, given_back = run(ppo(), "interstage"), run(ppo(), "interstage", "scaling")
    assert kept.inference_end is not None
    assert kept.inference_end >= kept.end
    assert kept.held == pytest.approx(kept.replicas * kept.inference_end)
    assert given_back.inference_end is not None
    assert given_back.held < given_back.replicas * given_back.inference_end


def test_without_calls_to_take_over_there_is_no_inference():
    assert run(ppo(), "interstage", takeover=False).inference_end is None


def test_elastic_holds_less():
    result = run(grpo(), "scaling")
    assert result.held < result.replicas * result.end
