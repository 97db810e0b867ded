"""What the plugin `realloc` refuses, and when it takes part."""

import pytest
from omegaconf import OmegaConf

from verl_fuse_realloc import plugin

ROLLOUT = {
    "name": "vllm",
    "dtype": "bfloat16",
    "quantization": None,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "disaggregation": {"enabled": False},
}


def composed(**changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "fsdp_config": {"qat": {"enable": False}}},
                "rollout": ROLLOUT,
                "model": {"lora_rank": 0, "lora": {"rank": 0}, "mtp": {"enable": False}},
                "hybrid_engine": True,
            },
            "fuse": {"realloc": {"weight_sync": "shards", "timeout": 30.0, "checksums": True}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(**changes) -> list[tuple]:
    return [(r.key, r.value) for r in plugin.fuse_validate(config=composed(**changes)) or ()]


def test_what_fits_is_not_refused_and_stock_asks_nothing():
    assert refused() == []
    stock = composed(fuse__realloc__weight_sync="stock", actor_rollout_ref__actor__strategy="megatron")
    assert plugin.fuse_validate(config=stock) is None
    assert plugin.fuse_contracts(config=stock) == ()
    assert plugin.fuse_worker_class(model="actor", base=object, config=stock) is None
    assert plugin.fuse_worker_class(model="critic", base=object, config=composed()) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("actor_rollout_ref.actor.strategy", "fsdp"),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("actor_rollout_ref.rollout.name", "sglang"),
        ("actor_rollout_ref.rollout.dtype", "auto"),
        ("actor_rollout_ref.rollout.quantization", "fp8"),
        ("actor_rollout_ref.rollout.data_parallel_size", 2),
        ("actor_rollout_ref.rollout.expert_parallel_size", 2),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", 2),
        ("actor_rollout_ref.rollout.disaggregation.enabled", True),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable", True),
        ("actor_rollout_ref.model.lora_rank", 8),
        ("actor_rollout_ref.model.lora.rank", 8),
        ("actor_rollout_ref.model.mtp.enable", True),
        ("actor_rollout_ref.hybrid_engine", False),
    ],
)
def test_what_is_refused_names_key_value_and_what_is_allowed(key: str, value: object):
    (refusal,) = plugin.fuse_validate(config=composed(**{key.replace(".", "__"): value})) or ()
    assert (refusal.key, refusal.value) == (key, value)
    assert "fuse.realloc.weight_sync=shards" in refusal.allowed
