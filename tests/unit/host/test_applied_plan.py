from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.applied_plan import apply_plan, checked_plan
from verl_fuse.host.start.settings import Settings, load_settings
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse_placement.config import DeviceRange, PlacementConfig

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BASE = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 8, "device": "cuda", "v1": {"trainer_mode": "fuse"}},
    "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": False}},
    "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"tensor_model_parallel_size": 2}},
    "critic": {"enable": None},
    "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
}


@pytest.fixture
def config():
    return OmegaConf.create(BASE)


def write(tmp_path, **changes):
    calls = tuple(
        CallPlan(name, Mesh(0, 8), Layout(dp=8)) for name in changes.pop("calls", ("actor_generate", "actor_train"))
    )
    overrides = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, TP: 4}
    path = tmp_path / "plan.json"
    Plan(calls, **{"strategy": "fsdp", "overrides": overrides, **changes}).write(path)
    return path


def test_a_plan_sets_its_keys_and_says_which_it_changed(config, tmp_path):
    plan = checked_plan(write(tmp_path), config, ())
    assert apply_plan(config, plan.overrides) == [f"fuse.plan sets {TP}=4 (was 2)"]
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"strategy": None, "features": ("realloc",)},
            "needs weights to be moved between layouts: make a plan without --ideal",
        ),
        (
            {"strategy": "megatron"},
            "it is for the engine megatron, actor_rollout_ref.actor.strategy=fsdp2: compose with model_engine=megatron",
        ),
        ({"overrides": {"trainer.nnodes": 4}}, "it is for trainer.nnodes=4, this run has 1"),
        (
            {"calls": ("actor_generate", "actor_train", "critic_train")},
            "it is for a step with a critic, this run is without one",
        ),
        ({"features": ("interstage",)}, "it counts on interstage: set fuse.interstage.enabled=true"),
        (
            {"overrides": {"actor_rollout_ref.rollout.warp": 9}},
            "it sets actor_rollout_ref.rollout.warp, which this verl does not have",
        ),
    ],
)
def test_what_this_run_cannot_carry_out_is_refused(config, tmp_path, changes, reason):
    path = write(tmp_path, **changes)
    with pytest.raises(FuseError) as error:
        checked_plan(path, config, ())
    assert str(error.value).startswith(f"fuse.plan={path}: this run cannot carry it out:")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("estimator", "enable", "critic"),
    [("gae", None, True), ("grpo", None, False), ("grpo", True, True), ("gae", False, False)],
)
def test_a_plan_has_a_critic_exactly_where_the_run_has_one(config, tmp_path, estimator, enable, critic):
    config.algorithm.adv_estimator, config.critic.enable = estimator, enable
    calls = ("actor_generate", "actor_train"), ("actor_generate", "actor_train", "critic_train")
    checked_plan(write(tmp_path, calls=calls[critic]), config, ())
    said = ("with a critic, this run is without one", "without a critic, this run is with one")[critic]
    with pytest.raises(FuseError, match=f"it is for a step {said}$"):
        checked_plan(write(tmp_path, calls=calls[not critic]), config, ())


def test_a_plan_of_another_engine_is_refused_without_a_reason_per_key_of_that_engine(config, tmp_path):
    megatron = {f"actor_rollout_ref.actor.megatron.{size}": 2 for size in ("a", "b", "c")}
    with pytest.raises(FuseError) as error:
        checked_plan(write(tmp_path, strategy="megatron", overrides=megatron), config, ())
    assert str(error.value).count("\n  - ") == 1
    assert "it is for the engine megatron" in str(error.value)


def test_every_reason_is_given_at_once(config, tmp_path):
    with pytest.raises(FuseError) as error:
        checked_plan(write(tmp_path, strategy="megatron", features=("pipeline",)), config, ())
    assert str(error.value).count("\n  - ") == 2


def test_settings_hold_the_overrides_and_the_threshold(config, tmp_path):
    path = write(tmp_path, features=("interstage",), migration_threshold=0.25)
    fuse = {"fuse": {"plan": str(path), "interstage": {"enabled": True}}}
    settings = load_settings(OmegaConf.merge(config, fuse))
    assert settings.overrides[TP] == 4
    assert settings.blocks["interstage"].migration_threshold == 0.25
    own = {"fuse": {"interstage": {"migration_threshold": 0.5}}}
    assert load_settings(OmegaConf.merge(config, fuse, own)).blocks["interstage"].migration_threshold == 0.5


@pytest.mark.parametrize(
    ("plan", "fuse", "reason"),
    [
        (
            {"migration_threshold": 0.25},
            {"elastic": {"enabled": True, "scale": True}},
            "fuse.interstage.migration_threshold=0.25: needs fuse.elastic.scale=false",
        ),
        (
            {"overrides": {"++critic.megatron.virtual_pipeline_model_parallel_size": 2}},
            {},
            "critic.megatron.virtual_pipeline_model_parallel_size=2: not yet with fuse.interstage.enabled=true",
        ),
    ],
)
def test_what_the_plan_sets_is_refused_like_what_the_user_sets(config, tmp_path, plan, fuse, reason):
    path = write(tmp_path, features=("interstage",), **plan)
    config = OmegaConf.merge(config, {"fuse": {"plan": str(path), "interstage": {"enabled": True}, **fuse}})
    before = deepcopy(config)
    with pytest.raises(FuseError) as error:
        load_settings(config)
    assert reason in str(error.value)
    assert config == before


def test_a_run_is_checked_with_what_the_plan_sets(config, tmp_path):
    """A pipeline of two stages that only the plan has; and one that only the configuration had."""
    config.algorithm.adv_estimator = "gae"
    roles = ("actor_rollout_ref.actor", "critic")
    for role in roles:
        OmegaConf.update(config, role, {"strategy": "megatron", "megatron": {"pipeline_model_parallel_size": 1}})
    config = OmegaConf.merge(config, {"fuse": {"plan": None, "pipeline": {"enabled": True}}})
    depths = [f"{role}.megatron.pipeline_model_parallel_size" for role in roles]

    def load(depth: int) -> Settings:
        changes = {"strategy": "megatron", "features": ("pipeline",), "calls": ("actor_generate", "critic_train")}
        config.fuse.plan = str(write(tmp_path, **changes, overrides=dict.fromkeys(depths, depth)))
        return load_settings(config)

    assert load(2).overrides == dict.fromkeys(depths, 2)
    assert config.critic.megatron.pipeline_model_parallel_size == 1
    for depth in depths:
        OmegaConf.update(config, depth, 2)
    with pytest.raises(FuseError, match="needs a pipeline of at least 2 stages"):
        load(1)


PLACED = {"placement.critic": {"first": 6, "devices": 2}, "placement.defer": True, "elastic.max_replicas": 3}


def write_placed(tmp_path, **changes):
    meshes = {"actor_generate": Mesh(0, 6), "critic_train": Mesh(6, 2), "actor_train": Mesh(0, 8)}
    calls = tuple(CallPlan(name, mesh, Layout(dp=mesh.size)) for name, mesh in meshes.items())
    path = tmp_path / "plan.json"
    seconds = {
        "actor_generate": 5.0,
        "actor_generate_weights": 0.5,
        "critic_train": 2.0,
        "actor_train": 3.0,
        "step": 9.0,
    }
    Plan(
        calls, features=("placement",), replicas=3, strategy="fsdp", overrides={TP: 2}, predicted=seconds, **changes
    ).write(path)
    return path


@pytest.fixture
def with_critic(config):
    changes = {
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"strategy": "fsdp2", "ppo_mini_batch_size": 8},
        "actor_rollout_ref": {"rollout": {"n": 1, "name": "vllm"}},
    }
    return OmegaConf.merge(config, changes)


def test_a_plan_places_the_critic_and_parks_replicas(with_critic, tmp_path):
    fuse = {"fuse": {"plan": str(write_placed(tmp_path)), "elastic": {"enabled": True}}}
    config = OmegaConf.merge(with_critic, fuse)
    settings = load_settings(config)
    assert settings.blocks["placement"] == PlacementConfig(DeviceRange(6, 2), defer=True)
    assert settings.blocks["elastic"].max_replicas == 3
    assert "fuse.plan sets fuse.elastic.max_replicas=3 (was null)" in apply_plan(config, settings.overrides)
    assert {key: OmegaConf.select(config, f"fuse.{key}") for key in PLACED} == PLACED
    assert settings.planned_seconds == {
        "gen": 5.0, "update_weights": 0.5, "update_critic": 2.0, "update_actor": 3.0, "step": 9.0,
    }  # fmt: skip
    # Once it is applied, as a worker reads it.
    assert load_settings(config).blocks == settings.blocks


@pytest.mark.parametrize(
    ("fuse", "reason"),
    [
        ({}, "it counts on elastic: set fuse.elastic.enabled=true, or plan without --feature placement"),
        (
            {"placement": {"critic": {"first": 4, "devices": 4}}},
            "it is for fuse.placement.critic={'first': 6, 'devices': 2}, this run has {'first': 4, 'devices': 4}",
        ),
        ({"elastic": {"enabled": True, "max_replicas": 2}}, "it is for fuse.elastic.max_replicas=3, this run has 2"),
        ({"disabled_plugins": ["placement"]}, "it sets keys of fuse.placement, a plugin that fuse.disabled_plugins"),
    ],
)
def test_a_placement_that_the_run_has_otherwise_is_refused(with_critic, tmp_path, fuse, reason):
    config = OmegaConf.merge(with_critic, {"fuse": {"plan": str(write_placed(tmp_path)), **fuse}})
    with pytest.raises(FuseError) as error:
        load_settings(config)
    assert reason in str(error.value)


def test_a_missing_plan_is_refused_before_anything_starts(config):
    with pytest.raises(FuseError, match=r"nowhere\.json: cannot be read"):
        load_settings(OmegaConf.merge(config, {"fuse": {"plan": "nowhere.json"}}))
