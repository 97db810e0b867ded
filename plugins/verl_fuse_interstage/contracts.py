"""Configuration of verl under which finished samples may not be streamed, or unfinished ones not moved (refusals.py)."""

from verl_fuse.host.upstream.targets import FSDP_YAML, MODEL_YAML, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import ConfigGroup, ConfigKey, Contract

CONTRACTS: tuple[Contract, ...] = (
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable", False),
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable_resource_pool", False),
    ConfigKey(ROLLOUT_YAML, "name", "???"),
    ConfigKey(ROLLOUT_YAML, "full_determinism", False),
    ConfigKey(ROLLOUT_YAML, "disaggregation.enabled", False),
    # Devices of a replica, and how a slice's models use them.
    ConfigKey(ROLLOUT_YAML, "data_parallel_size", int),
    ConfigKey(ROLLOUT_YAML, "pipeline_model_parallel_size", int),
    ConfigKey(FSDP_YAML, "ulysses_sequence_parallel_size", int),
    ConfigKey(FSDP_YAML, "fsdp_size", int),
    ConfigKey(FSDP_YAML, "qat.enable", False),
    ConfigKey("verl/trainer/config/actor/dp_actor.yaml", "ulysses_sequence_parallel_size", int),
    ConfigKey("verl/trainer/config/ref/dp_ref.yaml", "ulysses_sequence_parallel_size", object),
    ConfigKey(MODEL_YAML, "lora_adapter_path", object),
    ConfigKey("verl/trainer/config/engine/megatron.yaml", "virtual_pipeline_model_parallel_size", object),
    ConfigGroup(PPO_YAML, "reward@reward: reward"),
    ConfigGroup("verl/trainer/config/actor/megatron_actor.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/ref/megatron_ref.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/critic/megatron_critic.yaml", "../engine@megatron: megatron"),
)
