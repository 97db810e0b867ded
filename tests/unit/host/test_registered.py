"""Rollout engines and advantage estimators by name, looked up before a run starts in what verl's source registers."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.host.start.registered import name_refusals

pytest.importorskip("verl")
ENGINE, ESTIMATOR = "actor_rollout_ref.rollout.name", "algorithm.adv_estimator"
MISSPELT = {ENGINE: "vllmm", ESTIMATOR: "grop"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RAY_ADDRESS", "VERL_USE_EXTERNAL_MODULES"):
        monkeypatch.delenv(name, raising=False)


def refused(**changes) -> dict[str, str]:
    """Return the refusals of a run with both names misspelt: key -> message; `changes` by dotted name."""
    config = OmegaConf.create()
    for key, value in {**MISSPELT, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return {refusal.key: str(refusal) for refusal in name_refusals(config)}


def test_a_name_that_nothing_registers_is_refused_with_those_that_are():
    own = "or what a module in actor_rollout_ref.model.external_lib registers"
    found = refused()
    assert set(found) == {ENGINE, ESTIMATOR}
    assert found[ENGINE] == (
        f"{ENGINE}='vllmm': not registered in verl (did you mean 'vllm'?); allowed: sglang, trtllm, vllm, {own}"
    )
    assert found[ESTIMATOR].startswith(f"{ESTIMATOR}='grop': not registered in verl (did you mean 'grpo'?); allowed: ")
    assert found[ESTIMATOR].endswith(own)


# Ray warns of its own imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_verl_registers_is_accepted():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert len(ADV_ESTIMATOR_REGISTRY) > 10
    for name in ADV_ESTIMATOR_REGISTRY:
        assert set(refused(algorithm__adv_estimator=name)) == {ENGINE}
    for name in RolloutReplicaRegistry._registry:
        assert set(refused(actor_rollout_ref__rollout__name=name)) == {ESTIMATOR}


# Ray and verl warn of what they import.
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_v1_is_one_that_is_registered():
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    mode = "trainer.v1.trainer_mode"
    assert {"sync", "colocate_async", "separate_async"} <= set(TRAINER_REGISTRY)
    for name in {*TRAINER_REGISTRY, "fuse"}:
        assert mode not in refused(trainer__v1__trainer_mode=name)
    assert refused(trainer__v1__trainer_mode="fues")[mode].startswith(
        f"{mode}='fues': not registered in verl (did you mean 'fuse'?); allowed: sync, "
    )


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.model.external_lib",
        "critic.model.external_lib",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
        "data.custom_cls.path",
        "data.sampler.class_path",
        "reward.reward_manager.module.path",
        "trainer.checkpoint_callback_class",
        "trainer.v1.sampler.custom_sampler.path",
        "ray_kwargs.ray_init.runtime_env.working_dir",
        "ray_kwargs.ray_init.address",
    ],
)
def test_names_are_left_to_verl_where_the_users_code_may_register_them(key):
    assert refused(**{key: "acme"}) == {}
    assert set(refused(**{key: None})) == {ENGINE, ESTIMATOR}


def test_names_are_left_to_verl_beside_modules_of_the_environment(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "acme")
    assert refused() == {}


def test_names_are_left_to_verl_beside_plugins_of_others(installed_plugin):
    installed_plugin("stranger", "")
    assert refused() == {}


def test_a_reward_function_does_not_reach_the_process_that_trains():
    assert set(refused(reward__custom_reward_function__path="/rewards.py")) == {ENGINE, ESTIMATOR}


def test_a_name_that_is_not_looked_up_is_not_refused():
    assert refused(trainer__use_v1=False) == {}
    assert set(refused(trainer__val_only=True)) == {ENGINE}
    assert refused(actor_rollout_ref__rollout__name=None, algorithm__adv_estimator=None) == {}


@pytest.mark.parametrize(
    ("key", "value", "left"),
    [
        ("actor_rollout_ref.model._target_", "my.package.ModelConfig", True),
        ("actor_rollout_ref.model._target_", "verl.workers.config.HFModelConfig", False),
        ("hydra.launcher._target_", "hydra._internal.core_plugins.basic_launcher.BasicLauncher", False),
    ],
)
def test_a_class_of_the_users_that_verl_makes_may_register_names(key: str, value: str, left: bool):
    assert (refused(**{key: value}) == {}) is left
