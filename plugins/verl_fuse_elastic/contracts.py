"""Declares contracts: the configuration of verl under which prompts may not be routed by assignment (refusals.py), and
the engine's account of its prefix cache."""

from verl_fuse.host.upstream.targets import ROLLOUT_YAML
from verl_fuse.spec.contract import Contract, config_keys, names

CONTRACTS: tuple[Contract, ...] = (
    *config_keys(ROLLOUT_YAML, "router_config_path free_cache_engine"),
    *names("vllm.outputs:RequestOutput", "num_cached_tokens"),
)
