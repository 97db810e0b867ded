"""Declares contracts: the configuration of verl under which prompts may not be routed by assignment (refusals.py), and
the engine's account of its prefix cache."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Contract, config, names

CONTRACTS: tuple[Contract, ...] = (
    *config(f"{t.ROLLOUT_YAML} router_config_path free_cache_engine"),
    *names("vllm.outputs:RequestOutput.num_cached_tokens"),
)
