"""Prompts that are computed once, in simulated steps."""

from dataclasses import replace

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.cost.model import Batch
from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.shared_prompts import copies_left, saved_share, shared_batch
from verl_fuse.simulate.step import StepResult, simulate_step
from verl_fuse.simulate.stock import stock_plan

FSDP = replace(NO_POLL, engine="fsdp")


def lengths(*groups: tuple[int, int]) -> DrawnLengths:
    """Groups of so many samples with a prompt of so many tokens; responses of 10, 20, 30, ... tokens."""
    group = np.repeat(np.arange(len(groups)), [samples for samples, _ in groups])
    prompt = np.array([prompt for _, prompt in groups])[group]
    response = 10 * (1 + np.arange(len(group)))
    return DrawnLengths(group, prompt, response, response)


def run(workload, strategy: str, options=FSDP) -> StepResult:
    plan = stock_plan(workload, h100(), options)
    return simulate_step(workload, plan, h100(), strategy, np.random.default_rng(0), options)


@pytest.mark.parametrize(("mini_batches", "left"), [(1, 1 / 8), (2, 0.249), (4, 0.450), (8, 0.656)])
def test_copies_of_a_prompt_that_are_left_are_those_of_samples_dealt_out_at_random(mini_batches: int, left: float):
    assert copies_left(8, mini_batches) == pytest.approx(left, abs=1e-3)
    rng = np.random.default_rng(0)
    dealt = [len(set(rng.integers(mini_batches, size=8))) / 8 for _ in range(20000)]
    assert np.mean(dealt) == pytest.approx(left, abs=5e-3)


def test_a_batch_has_each_prompt_once_and_responses_that_attend_to_all_of_it():
    drawn = lengths((3, 100), (1, 40))
    whole, shared = Batch.of(drawn.prompt + drawn.response), shared_batch(drawn, 1)
    assert (shared.sequences, shared.tokens) == (4, pytest.approx(100 + 40 + 100))
    responses = sum(2 * p * r + r * r for p, r in zip(drawn.prompt, drawn.response, strict=True))
    assert shared.squares == pytest.approx(100**2 + 40**2 + responses)
    alone = lengths((1, 100), (1, 40))
    assert shared_batch(alone, 4) == Batch.of(alone.prompt + alone.response)
    assert shared.tokens < shared_batch(drawn, 2).tokens < whole.tokens
    assert saved_share(drawn.group, drawn.prompt, drawn.response, 1) == pytest.approx(200 / whole.tokens)


def test_update_and_passes_compute_prompts_once_and_nothing_else_changes():
    workload = grpo(prompt="uniform:900-1100", response="uniform:400-600", samples=8, minibatches=4)
    stock, ours = run(workload, "observe"), run(workload, "share_prompts")
    share = {name: ours.stages[name] / stock.stages[name] for name in stock.stages}
    # Two thirds of the tokens are of prompts: 1/3 + 2/3 * .125 and 1/3 + 2/3 * .45.
    assert share["old_log_prob"] == pytest.approx(0.42, abs=0.04)
    assert share["ref"] == pytest.approx(0.42, abs=0.04)
    assert share["update_actor"] == pytest.approx(0.63, abs=0.04)
    assert share["gen"] == share["update_weights"] == 1
    assert ours.notes == ("45% of the copies of a prompt are computed in the update, 12% in a pass",)


def test_calls_beside_generation_and_reward_and_a_critic_on_other_devices_compute_all():
    workload = ppo(samples=4, prompts=64)
    for beside, expected in (
        ("observe", {"old_log_prob", "ref", "values", "update_actor", "update_critic"}),
        ("streaming", {"update_actor", "update_critic"}),
    ):
        stock, ours = run(workload, beside), run(workload, f"{beside}+share_prompts".removeprefix("observe+"))
        assert {name for name in stock.stages if ours.stages[name] != stock.stages[name]} == expected
    stock, ours = run(workload, "placement"), run(workload, "placement+share_prompts")
    assert ours.stages["update_critic"] == stock.stages["update_critic"]
    assert ours.stages["update_actor"] < stock.stages["update_actor"]


def test_where_nothing_is_shared_the_step_is_stocks_and_says_why():
    alone = grpo(samples=1, prompts=256)
    assert run(alone, "share_prompts").seconds == run(alone, "observe").seconds
    assert run(alone, "share_prompts").notes == ("each prompt has one sample",)
    megatron = replace(NO_POLL, engine="megatron")
    found = run(grpo(), "share_prompts", megatron)
    assert found.seconds == run(grpo(), "observe", megatron).seconds
    assert found.notes == ("prompts are shared by FSDP's engines alone (--set engine=fsdp)",)


def test_logits_of_responses_alone_shorten_update_and_passes_of_fsdp():
    workload = grpo(prompt="uniform:900-1100", response="uniform:400-600", samples=8, prompts=16)
    plain, fewer, both = (
        run(workload, name) for name in ("observe", "response_logits", "response_logits+share_prompts")
    )
    for stage in ("update_actor", "old_log_prob"):
        assert 0.7 * plain.stages[stage] < fewer.stages[stage] < plain.stages[stage]
        assert both.stages[stage] < fewer.stages[stage]
    assert fewer.stages["gen"] == plain.stages["gen"]
    megatron = replace(NO_POLL, engine="megatron")
    same = [run(workload, name, megatron).seconds for name in ("observe", "response_logits")]
    assert same[0] == same[1]
