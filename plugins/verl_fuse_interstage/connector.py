"""Fill in the parameters that each request gives a KV connector of vLLM: `fuse.interstage.kv_transfer_params`, with the
name of the weights in them."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.spec.composed import Get

TOLD = "fuse.interstage.kv_transfer_params"


def connector_params(get: Get, weights: str) -> Mapping[str, Any] | None:
    """Return the parameters for a request that is generated with `weights`; None where nothing is configured."""
    params = get(TOLD)
    return None if params is None else _filled(plain(params), weights)


def plain(node: Any) -> Any:
    """Return a configuration node as Python's own containers."""
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def _filled(value: Any, weights: str) -> Any:
    """Return `value` with the name of the weights in every string."""
    match value:
        case str():
            return value.replace("{weights}", weights)
        case list():
            return [_filled(item, weights) for item in value]
        case Mapping():
            return {key: _filled(item, weights) for key, item in value.items()}
    return value
