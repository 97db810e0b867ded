import dataclasses

import pytest
from workloads import grpo, ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.executable import best_executable, spaces
from verl_fuse.spec.cluster import Mesh, cluster_named


def best(workload, strategy: str, cluster: str = "h100", nodes: int = 1, **changes):
    machines = dataclasses.replace(cluster_named(cluster, nodes), **changes)
    found = best_executable(workload, AnalyticCost(machines), strategy, 20.0)
    return {plan.call: plan for plan in found.space.plan(found.choice)}


def test_megatron_roles_share_one_layout_and_fsdp_is_sharded_over_everything():
    megatron, fsdp = best(ppo(), "megatron", nodes=2), best(ppo(), "fsdp", nodes=2)
    trained = [name for name in megatron if name != "actor_generate"]
    assert len({(megatron[name].mesh, megatron[name].layout) for name in trained}) == 1
    for name in trained:
        assert fsdp[name].mesh == Mesh(0, 16)
        assert fsdp[name].layout.tp == fsdp[name].layout.pp == 1
    for plan in (megatron, fsdp):
        assert plan["actor_generate"].layout.pp == 1
        assert plan["actor_generate"].layout.tp <= 8


def test_inference_runs_in_the_layout_of_training():
    plan = best(grpo(), "fsdp")
    assert plan["actor_infer"].layout == plan["actor_train"].layout == plan["reference_infer"].layout


def test_a_reward_model_may_have_a_pool_of_its_own():
    plan = best(ppo(reward="qwen2.5-7b"), "fsdp", nodes=4)
    main, reward = plan["actor_train"].mesh, plan["reward_infer"].mesh
    assert reward == main or (reward.first == main.end and reward.end == 32 and reward.size % 8 == 0)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_what_fits_nowhere_says_how_much_memory_would_do(strategy: str):
    big, small = ppo("llama-3.1-405b"), cluster_named("a100", 1)
    with pytest.raises(
        FuseError, match=rf"{strategy}: no plan fits into 80.0 GiB per device; the leanest one needs (\d+\.\d) GiB"
    ) as error:
        best_executable(big, AnalyticCost(small), strategy, 5.0)  # type: ignore[arg-type]
    enough = float(str(error.value).split("needs ")[1].split(" GiB")[0]) + 0.1

    def search(memory: float):
        device = dataclasses.replace(small.device, memory=memory * 2**30)
        return best_executable(big, AnalyticCost(dataclasses.replace(small, device=device)), strategy, 5.0)  # type: ignore[arg-type]

    assert search(enough).feasible
    with pytest.raises(FuseError, match="no plan fits"):
        search(enough - 0.2)


def test_a_batch_that_no_layout_divides_is_refused():
    odd = dataclasses.replace(grpo(), prompts=3, samples=1, minibatches=1)
    with pytest.raises(FuseError, match="fsdp on 8 devices: no layout divides the models, the 3 sequences"):
        best(odd, "fsdp")


def test_a_pipeline_has_stages_and_no_expert_parallelism():
    def trained(features):
        found = spaces(ppo("qwen3-30b-a3b"), AnalyticCost(cluster_named("h200", 1)), "megatron", features)
        return {space.configs[space.config[space.tables.begin[-2]]].layout for space in found}

    plain, fused = trained(()), trained(("pipeline",))
    assert fused == {layout for layout in plain if layout.pp > 1 and layout.ep == 1}
    assert any(layout.pp > 1 and layout.ep > 1 for layout in plain)
