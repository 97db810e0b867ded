"""Hooks of the plugin `realloc`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_realloc.config import ReallocConfig
from verl_fuse_realloc.contracts import CONTRACTS
from verl_fuse_realloc.refusals import refusals

HOOK_API = 1


@hookimpl
def fuse_config() -> type:
    return ReallocConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    return list(refusals(partial(_get, config))) if _on(config) else None


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    return CONTRACTS if config is None or _on(config) else ()


@hookimpl
def fuse_worker_class(model: str, base: type, config: Mapping[str, Any]) -> type | None:
    if model != "actor" or not _on(config):
        return None
    from verl_fuse.host.weight_sync.hybrid import Options, shard_sync_worker_class

    default = ReallocConfig()
    timeout, checksums = _get(config, "fuse.realloc.timeout"), _get(config, "fuse.realloc.checksums")
    options = Options(
        default.timeout if timeout is None else float(timeout),
        default.checksums if checksums is None else checksums,
    )
    return shard_sync_worker_class(base, options)


def _on(config: Mapping[str, Any]) -> bool:
    return _get(config, "fuse.realloc.weight_sync") == "shards"


def _get(config: Mapping[str, Any], key: str) -> Any:
    return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]
