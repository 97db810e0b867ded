"""Declares contracts: the configuration of verl under which prompts may not be routed by assignment (refusals.py), and
the engine's account of its prefix cache."""

from verl_fuse.host.upstream.targets import ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, ConfigKey, Contract

CONTRACTS: tuple[Contract, ...] = (
    ConfigKey(ROLLOUT_YAML, "router_config_path", None),
    ConfigKey(ROLLOUT_YAML, "free_cache_engine", True),
    Attribute("vllm.outputs:RequestOutput.num_cached_tokens"),
)
