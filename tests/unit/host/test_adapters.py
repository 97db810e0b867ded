"""A policy with adapters beside a reference and a critic, which verl 0.9.1 cannot train: named before a run starts."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.adapters import adapter_refusals
from verl_fuse.host.start.settings import load_settings

MODEL = "actor_rollout_ref.model"
PPO = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True, f"{MODEL}.lora_rank": 8}


def configuration(settings: dict):
    config = OmegaConf.create({"critic": {"enable": None}})
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    return config


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({}, f"{MODEL}.lora_rank", "AttributeError: disable_adapter"),
        ({"critic.model.lora_rank": 4}, f"{MODEL}.lora_rank", "those without its adapter"),
        ({f"{MODEL}.lora_rank": 0, f"{MODEL}.lora.rank": 4}, f"{MODEL}.lora.rank", "AttributeError"),
        ({f"{MODEL}.lora_rank": 0, f"{MODEL}.lora_adapter_path": "a"}, f"{MODEL}.lora_adapter_path", "AttributeError"),
    ],
)
def test_adapters_with_a_reference_and_a_critic_are_refused_by_key(changes, key, said):
    (refusal,) = adapter_refusals(configuration(PPO | changes))
    assert refusal.key == key
    assert said in str(refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MODEL}.lora_rank": 0},
        {"algorithm.use_kl_in_reward": False},
        {"algorithm.adv_estimator": "grpo"},
        {"critic.enable": False},
    ],
)
def test_without_one_of_the_three_there_is_nothing_to_refuse(changes):
    assert list(adapter_refusals(configuration(PPO | changes))) == []


def test_it_is_refused_with_everything_else():
    with pytest.raises(FuseError, match=f"{MODEL}.lora_rank=8: not with a reference and a critic"):
        load_settings(configuration(PPO))
