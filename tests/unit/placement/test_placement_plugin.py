"""What the plugin `placement` refuses, and what it says of the critic's devices."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block, without_effect
from verl_fuse.spec.composed import getter
from verl_fuse.testing import SetUpTrainer
from verl_fuse_placement.config import DeviceRange, PlacementConfig
from verl_fuse_placement.plugin import PlacementPlugin, deferred
from verl_fuse_placement.refusals import candidates

PLUGIN = PlacementPlugin()
CRITIC, DEFER = "fuse.placement.critic", "fuse.placement.defer"
PARKED = {"trainer.device": "cuda", "fuse.elastic.enabled": True, "fuse.elastic.max_replicas": 3}


def composed(**changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}, "nnodes": 2, "n_gpus_per_node": 4, "device": "cpu"},
            "algorithm": {"adv_estimator": "gae"},
            "critic": {"strategy": "fsdp2", "ppo_mini_batch_size": 8},
            "actor_rollout_ref": {"rollout": {"n": 1, "tensor_model_parallel_size": 2}},
            "fuse": {"placement": {"critic": {"first": 6, "devices": 2}, "defer": True}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def refused(**changes) -> set[str]:
    return {refusal.key for refusal in PLUGIN.fuse_validate(config=composed(**changes))}


def test_a_run_without_a_placement_is_asked_nothing():
    off = {CRITIC: None, "critic.strategy": "megatron", "trainer.v1.trainer_mode": "sync"}
    assert refused(**off) == set()
    assert PLUGIN.fuse_contracts(config=composed(**off)) == ()
    assert PLUGIN.fuse_contracts(config=None) == PLUGIN.fuse_contracts(config=composed()) != ()


def test_the_devices_are_the_critic_s_alone():
    hook = plugins.load().hook
    assert hook.fuse_devices(model="critic", config=composed()) == range(6, 8)
    assert hook.fuse_devices(model="actor", config=composed()) is None
    assert hook.fuse_devices(model="critic", config=composed(**{CRITIC: None})) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PARKED,
        {CRITIC: {"first": 0, "devices": 8}},
        {"critic.strategy": "fsdp"},
        {"critic.fsdp.fsdp_size": -1},
        # Six samples for two ranks.
        {"critic.ppo_mini_batch_size": 3, "actor_rollout_ref.rollout.n": 2},
    ],
    ids=str,
)
def test_what_fits_is_not_refused(changes):
    assert refused(**changes) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.adv_estimator", "grpo"),
        ("critic.strategy", "megatron"),
        ("critic.ppo_mini_batch_size", 3),
        ("critic.fsdp.ulysses_sequence_parallel_size", 4),
        ("fuse.pipeline.enabled", True),
        ("actor_rollout_ref.hybrid_engine", False),
        ("global_profiler.steps", [1]),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(key, value):
    assert refused(**{key: value}) == {key}


def test_all_that_does_not_fit_is_refused_at_once():
    several = {
        "algorithm.adv_estimator": "grpo",
        "critic.strategy": "megatron",
        "critic.fsdp.fsdp_size": 3,
        "critic.fsdp.ulysses_sequence_parallel_size": 5,
        "fuse.pipeline.enabled": True,
        CRITIC: {"first": 4, "devices": 4},
    }
    assert refused(**several) == several.keys() - {CRITIC}
    off = {"fuse.elastic.enabled": False, "fuse.elastic.max_replicas": 4}
    assert refused(**(PARKED | off)) == off.keys()
    elsewhere = {CRITIC: {"first": 0, "devices": 2}, "fuse.elastic.enabled": False, "fuse.elastic.standalone": 1}
    assert refused(**(PARKED | elsewhere)) == elsewhere.keys() - {CRITIC} | {f"{CRITIC}.first"}


def test_devices_that_are_not_there_are_counted():
    (refusal,) = PLUGIN.fuse_validate(config=composed(**{CRITIC: {"first": 7, "devices": 2}}))
    assert (refusal.key, refusal.value) == (f"{CRITIC}.devices", 2)
    assert "first=7 leaves 1 of the 8 there are" in refusal.allowed


def test_shards_divide_the_critic_s_devices():
    wide = {CRITIC: {"first": 4, "devices": 4}}
    assert refused(**wide, **{"critic.fsdp.fsdp_size": 3}) == {"critic.fsdp.fsdp_size"}
    assert refused(**wide, **{"critic.fsdp.fsdp_size": 2}) == set()


def test_a_profile_is_refused_of_a_deferred_update_only():
    assert refused(**{"global_profiler.steps": [1], DEFER: False}) == set()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fuse.elastic.enabled": None}, "fuse.elastic.enabled"),
        ({"fuse.elastic.max_replicas": 4}, "fuse.elastic.max_replicas"),
        ({"fuse.elastic.max_replicas": None}, "fuse.elastic.max_replicas"),
        ({"fuse.elastic.standalone": 1}, "fuse.elastic.standalone"),
        ({CRITIC: {"first": 4, "devices": 2}, "fuse.elastic.max_replicas": 2}, f"{CRITIC}.first"),
        ({CRITIC: {"first": 0, "devices": 8}}, f"{CRITIC}.first"),
    ],
)
def test_on_an_accelerator_no_replica_generates_beside_a_deferred_update(changes, key):
    assert refused(**(PARKED | changes)) == {key}
    assert refused(**(PARKED | changes | {DEFER: False})) == set()


AUTO = {CRITIC: "auto", DEFER: False, "fuse.elastic.enabled": True}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_may_choose_the_devices(device):
    assert refused(**AUTO, **{"trainer.device": device}) == set()
    assert plugins.load().hook.fuse_devices(model="critic", config=composed(**AUTO)) is None
    assert PLUGIN.fuse_contracts(config=composed(**AUTO)) != ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.adv_estimator", "grpo"),
        ("critic.strategy", "megatron"),
        ("critic.ppo_mini_batch_size", 3),
        ("critic.fsdp.ulysses_sequence_parallel_size", 8),
        ("fuse.pipeline.enabled", True),
        ("actor_rollout_ref.hybrid_engine", False),
        ("global_profiler.steps", [1]),
        ("fuse.elastic.enabled", None),
        ("fuse.elastic.standalone", 1),
        ("fuse.elastic.min_replicas", 4),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_that_could_choose_nothing_is_refused(key, value, device):
    assert refused(**(AUTO | {"trainer.device": device, key: value})) == {key}


def test_one_replica_leaves_nothing_to_choose():
    (refusal,) = PLUGIN.fuse_validate(config=composed(**AUTO, **{"trainer.n_gpus_per_node": 1}))
    assert (refusal.key, refusal.value) == (CRITIC, "auto")
    assert "two rollout replicas or more on the training devices, not 1" in refusal.allowed


def test_a_candidate_that_does_not_divide_is_left_out():
    """Two, or four of the eight devices: a mini-batch of six has no equal parts on four."""
    get = getter(composed(**AUTO, **{"critic.ppo_mini_batch_size": 6}))
    assert {apart: [refusal.key for refusal in found] for apart, found in candidates(get).items()} == {
        1: [],
        2: ["critic.ppo_mini_batch_size"],
    }
    assert refused(**AUTO, **{"critic.ppo_mini_batch_size": 6}) == set()


def test_the_block_is_read_with_its_range():
    block = read_block(PlacementConfig, {"critic": {"first": 6, "devices": 2}, "defer": True}, "fuse.placement")
    assert block == PlacementConfig(DeviceRange(6, 2), True)
    assert read_block(PlacementConfig, {"critic": "auto"}, "fuse.placement") == PlacementConfig("auto")
    with pytest.raises(FuseError, match=r"critic='best': needs a block with first, devices or one of 'auto' or null"):
        read_block(PlacementConfig, {"critic": "best"}, "fuse.placement")
    with pytest.raises(FuseError, match=r"fuse.placement.critic.first=-1: needs >= 0"):
        read_block(PlacementConfig, {"critic": {"first": -1, "devices": 1}}, "fuse.placement")
    with pytest.raises(FuseError, match=r"fuse.placement.critic: missing devices"):
        read_block(PlacementConfig, {"critic": {"first": 1}}, "fuse.placement")
    assert without_effect(PlacementConfig(None, True)) == {(("critic", None),): {"defer": True}}


def test_it_is_set_up_only_where_the_critic_has_devices():
    def used(*block) -> list[Any]:
        trainer = SetUpTrainer(block=PlacementConfig(*block))
        PLUGIN.fuse_setup(trainer=trainer)
        return trainer.used

    assert used() == used(DeviceRange(1, 1)) == []
    assert used(DeviceRange(1, 1), True) == [("add_part", {"make": deferred})]
