import dataclasses
import random
import re

import numpy as np
import pytest
from spaces import choices
from workloads import grpo, ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.descent import OVERFULL, cost
from verl_fuse.plan.executable import best_executable, spaces
from verl_fuse.plan.planner import move_seconds
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.lengths import LengthDistribution


def best(workload, strategy: str, cluster: str = "h100", nodes: int = 1, **changes):
    machines = dataclasses.replace(cluster_named(cluster, nodes), **changes)
    found = best_executable(workload, AnalyticCost(machines), strategy, 20.0)
    return {plan.call: plan for plan in found.space.plan(found.choice)}


def test_megatron_roles_share_one_layout_and_fsdp_is_on_all_devices():
    megatron, fsdp = best(ppo(), "megatron", nodes=2), best(ppo(), "fsdp", nodes=2)
    trained = [name for name in megatron if name != "actor_generate"]
    assert len({(megatron[name].mesh, megatron[name].layout) for name in trained}) == 1
    for name in trained:
        assert fsdp[name].mesh == Mesh(0, 16)
        assert fsdp[name].layout.shards in (8, 16)
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
    assert re.search(r"(actor|critic)_train in \S.* alone \d+\.\d GiB: .* between calls", str(error.value))
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


def test_a_shard_group_is_a_number_of_nodes_that_divides_the_pool():
    def shards(nodes: int) -> set[int]:
        found = spaces(grpo(), AnalyticCost(cluster_named("h100", nodes)), "fsdp")
        return {space.configs[space.config[space.tables.begin[-2]]].layout.shards for space in found}

    assert (shards(1), shards(2), shards(4)) == ({8}, {8, 16}, {8, 16, 32})


def test_the_critic_may_be_alone_where_whole_replicas_are_parked():
    found = set()
    for space in spaces(ppo(), AnalyticCost(cluster_named("h100", 1)), "fsdp", ("placement",)):
        of = {call.name: c for c, call in enumerate(space.calls)}
        begin = space.tables.begin
        placed = {name: {space.meshes[space.mesh[o]] for o in range(begin[c], begin[c + 1])} for name, c in of.items()}
        (generate,), (critic,), (actor,) = (
            placed[f"{name}"] for name in ("actor_generate", "critic_train", "actor_train")
        )
        assert placed["critic_infer"] == {critic}
        assert actor == placed["reference_infer"].pop() == Mesh(0, 8)
        apart = critic != actor
        assert (space.tables.deferred == of["critic_train"]) == apart
        assert generate == (Mesh(0, 8 - critic.size) if apart else Mesh(0, 8))
        engines = {space.configs[space.config[o]].layout for o in range(begin[0], begin[1])}
        assert all(not critic.size % engine.tp for engine in engines)
        found.add(critic)
    assert found == {Mesh(0, 8), Mesh(7, 1), Mesh(6, 2), Mesh(4, 4)}


def test_the_memory_of_a_parked_replica_is_counted_beside_the_critic():
    for space in spaces(ppo(), AnalyticCost(cluster_named("h100", 1)), "fsdp", ("placement",)):
        of = {call.name: c for c, call in enumerate(space.calls)}
        configs = [
            [space.configs[space.config[o]] for o in range(space.tables.begin[c], space.tables.begin[c + 1])]
            for c in (of["actor_generate"], of["critic_train"])
        ]
        if space.tables.deferred >= 0:
            (engine,), critics = configs
            assert all(critic.active > engine.active + engine.copy for critic in critics)


def random_ppo(seed: int):
    """A small step, and a cost model of four devices with little or much memory."""
    draw = random.Random(seed)
    response = LengthDistribution.parse(f"lognormal:median={draw.choice((50, 400, 2000))},sigma=1.0,max=4096")
    step = dataclasses.replace(
        ppo(draw.choice(("qwen2.5-0.5b", "qwen2.5-3b"))),
        prompts=draw.choice((8, 16, 64)),
        response=response,
        minibatches=2,
    )
    cluster = cluster_named("h100", 1)
    device = dataclasses.replace(cluster.device, memory=draw.choice((12, 20, 40, 80)) * 2**30)
    return step, AnalyticCost(dataclasses.replace(cluster, devices_per_node=4, device=device))


@pytest.mark.parametrize("seed", range(32))
def test_no_plan_with_a_critic_apart_is_faster_by_brute_force(seed: int):
    step, machine = random_ppo(seed)
    least = {False: np.inf, True: np.inf}
    for whole in spaces(step, machine, "fsdp", ("placement",)):
        space = whole.with_room_for_moves()
        for choice in choices(space):
            space.fill(move_seconds(step, machine), choice)
            apart = space.tables.deferred >= 0
            least[apart] = min(least[apart], cost(space.tables, choice))
    if min(least.values()) >= OVERFULL:
        with pytest.raises(FuseError, match="no plan fits"):
            best_executable(step, machine, "fsdp", 600.0, ("placement",))
        return
    found = best_executable(step, machine, "fsdp", 600.0, ("placement",))
    assert found.seconds == pytest.approx(min(least.values()))
    assert (found.space.tables.deferred >= 0) == (least[True] < least[False])
