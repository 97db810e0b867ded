"""The tuned stock placement."""

import dataclasses
from typing import Literal

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.errors import FuseError
from verl_fuse.simulate.replicas import mean_batch
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import by_tensor_parallel, compute_options, layouts, rollouts, stock_plan


@pytest.mark.parametrize("workload", [ppo(), grpo()], ids=["ppo", "grpo"])
def test_every_call_has_all_devices(workload):
    plan = stock_plan(workload, h100(), NO_POLL)
    assert [call.call for call in plan.calls] == [call.name for call in workload.calls]
    assert {(call.mesh.first, call.mesh.size) for call in plan.calls} == {(0, 16)}
    assert plan.call("actor_infer").layout == plan.call("actor_train").layout


def test_train_calls_fit_and_are_the_fastest():
    workload, cost = ppo(), h100()
    call = next(call for call in workload.calls if call.name == "actor_train")
    chosen = stock_plan(workload, cost, NO_POLL).call(call.name)
    found = dict(compute_options(workload, call, cost, NO_POLL))
    assert found[chosen] == min(found.values())
    for plan in found:
        parts = plan.layout.dp * plan.microbatches * workload.minibatches
        memory = cost.memory(
            workload.actor,
            "train",
            plan.layout,
            microbatch=mean_batch(workload).split(parts),
            microbatches=plan.microbatches,
        )
        assert memory.total <= cost.cluster.device.memory


def test_a_model_that_fits_nowhere_names_the_memory_it_needs():
    with pytest.raises(
        FuseError, match=r"llama-3.1-405b fits nowhere for actor_generate on 8 x H100 .* needs \d+\.\d GiB"
    ):
        stock_plan(ppo(actor="llama-3.1-405b"), h100(1), NO_POLL)
    with pytest.raises(FuseError, match=r"llama-65b fits nowhere for critic_train on 8 x H100 .* needs \d+\.\d GiB"):
        stock_plan(ppo(critic="llama-65b"), h100(1), NO_POLL)


def test_experts_are_shared_out_where_that_is_faster():
    workload, cost = grpo(actor="qwen3-30b-a3b"), h100()
    call = next(call for call in workload.calls if call.kind == "train")
    found = dict(compute_options(workload, call, cost, NO_POLL))
    assert {plan.layout.ep for plan in found} >= {1, 2, 4, 8, 16}
    assert stock_plan(workload, cost, NO_POLL).call(call.name).layout.ep > 1
    generating = layouts(cost, workload.actor, cost.cluster.devices, "generate", None)
    assert {(layout.tp, layout.ep) for layout in generating} >= {(8, 1), (8, 8), (1, 1)}


@pytest.mark.parametrize("actor", ["qwen2.5-7b", "qwen3-30b-a3b"])
def test_the_rollout_has_the_fastest_of_all_degrees_of_tensor_parallelism(actor: str):
    workload, cost = grpo(actor=actor), h100()
    widths = by_tensor_parallel(workload, cost, NO_POLL)
    found = {plan: seconds for plan, seconds in rollouts(workload, cost, NO_POLL)}
    assert list(widths) == sorted({plan.layout.tp for plan in found})
    assert len(widths) > 2
    for tp, (plan, seconds) in widths.items():
        assert seconds == found[plan] == min(found[other] for other in found if other.layout.tp == tp)
    chosen = stock_plan(workload, cost, NO_POLL).call("actor_generate")
    assert chosen == min(widths.values(), key=lambda one: one[1])[0]
    plan = stock_plan(workload, cost, NO_POLL)
    step = simulate_step(workload, plan, cost, "stock", np.random.default_rng(0), NO_POLL)
    assert step.stages["gen"] == pytest.approx(min(found.values()), rel=0.02), "up to prompts that samples share"


@pytest.mark.parametrize(("engine", "sizes"), [("fsdp", {8, 16}), ("megatron", {0}), (None, {0, 8, 16})])
def test_an_engine_has_its_layouts(engine: Literal["fsdp", "megatron"] | None, sizes: set[int]):
    workload, cost = grpo(), h100()
    call = next(call for call in workload.calls if call.kind == "train")
    options = dataclasses.replace(NO_POLL, engine=engine)
    assert {plan.layout.shards for plan, _ in compute_options(workload, call, cost, options)} == sizes
    plan = stock_plan(workload, cost, options)
    assert plan.call("actor_generate").layout.shards == 0
    assert plan.call("actor_train").layout.shards in sizes
