"""Configuration of verl under which finished samples may not be streamed, or unfinished ones not moved (refusals.py)."""

from verl_fuse.spec.contract import ConfigGroup, ConfigKey, Contract

PPO = "verl/trainer/config/ppo_trainer.yaml"

ROLLOUT = "verl/trainer/config/rollout/rollout.yaml"

MODEL = "verl/trainer/config/model/hf_model.yaml"

FSDP = "verl/trainer/config/engine/fsdp.yaml"

CONTRACTS: tuple[Contract, ...] = (
    ConfigKey(PPO, "algorithm.filter_groups.enable", False),
    ConfigKey(PPO, "trainer.v1.sampler.sync_refill_failed_groups", False),
    ConfigKey(PPO, "trainer.v1.sampler.custom_sampler.path", object),
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable", False),
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable_resource_pool", False),
    ConfigKey(ROLLOUT, "name", "???"),
    ConfigKey(ROLLOUT, "full_determinism", False),
    ConfigKey(ROLLOUT, "disaggregation.enabled", False),
    # Devices of a replica, and how a slice's models use them.
    ConfigKey(ROLLOUT, "data_parallel_size", int),
    ConfigKey(ROLLOUT, "pipeline_model_parallel_size", int),
    ConfigKey(FSDP, "ulysses_sequence_parallel_size", int),
    ConfigKey(FSDP, "fsdp_size", int),
    ConfigKey(FSDP, "qat.enable", False),
    ConfigKey("verl/trainer/config/actor/dp_actor.yaml", "ulysses_sequence_parallel_size", int),
    ConfigKey("verl/trainer/config/ref/dp_ref.yaml", "ulysses_sequence_parallel_size", object),
    ConfigKey(MODEL, "lora_adapter_path", object),
    ConfigKey("verl/trainer/config/engine/megatron.yaml", "virtual_pipeline_model_parallel_size", object),
    ConfigGroup(PPO, "reward@reward: reward"),
    ConfigGroup("verl/trainer/config/actor/megatron_actor.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/ref/megatron_ref.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/critic/megatron_critic.yaml", "../engine@megatron: megatron"),
)
