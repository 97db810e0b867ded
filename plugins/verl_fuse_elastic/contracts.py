"""Configuration of verl under which prompts may not be routed by assignment (refusals.py), and what the engine
says of its prefix cache."""

from verl_fuse.spec.contract import Attribute, ConfigKey, Contract

CONTRACTS: tuple[Contract, ...] = (
    ConfigKey("verl/trainer/config/rollout/rollout.yaml", "router_config_path", None),
    Attribute("vllm.outputs:RequestOutput.num_cached_tokens"),
)
