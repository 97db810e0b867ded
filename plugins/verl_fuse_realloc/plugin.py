"""Hooks of the plugin `realloc`."""

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_realloc import contracts, schedule
from verl_fuse_realloc.config import ReallocConfig
from verl_fuse_realloc.refusals import refusals

HOOK_API = 1


@hookimpl
def fuse_config() -> type:
    return ReallocConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    get = partial(_get, config)
    found = [*(refusals(get) if _syncs(config) else ()), *(schedule.refusals(get) if _changes(config) else ())]
    return found or None


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    synced = contracts.SYNC_CONTRACTS if config is None or _syncs(config) else ()
    megatron = config is None or _get(config, "actor_rollout_ref.actor.strategy") == "megatron"
    shards = contracts.MEGATRON_SYNC_CONTRACTS if synced and megatron else ()
    changed = contracts.LAYOUT_CONTRACTS if config is None or _changes(config) else ()
    return (*synced, *shards, *changed)


@hookimpl(wrapper=True)
def fuse_worker_class(model: str, base: type, config: Mapping[str, Any]) -> Generator[None, type | None, type | None]:
    # On top of what another plugin makes of verl's class: a run may train fused and send shards.
    found = yield
    default = ReallocConfig()
    timeout, checksums = _get(config, "fuse.realloc.timeout"), _get(config, "fuse.realloc.checksums")
    limits = (
        default.timeout if timeout is None else float(timeout),
        default.checksums if checksums is None else checksums,
    )
    if model == "actor" and _syncs(config):
        from verl_fuse.host.weights.sync.hybrid import shard_sync_worker_class

        found = shard_sync_worker_class(found or base, TransferOptions(*limits))
    if _changes(config):
        from verl_fuse.host.weights.layouts.worker import layout_worker_class

        found = layout_worker_class(model, found or base, TransferOptions(*limits))
    return found


@hookimpl
def fuse_setup(trainer: Any) -> None:
    if trainer.settings.blocks["realloc"].schedule:
        trainer.use_layouts(schedule.LayoutSchedule.read(partial(_get, trainer.config)).wanted)


def _syncs(config: Mapping[str, Any]) -> bool:
    return _get(config, "fuse.realloc.weight_sync") == "shards"


def _changes(config: Mapping[str, Any]) -> bool:
    return bool(schedule.scheduled(partial(_get, config)))


def _get(config: Mapping[str, Any], key: str) -> Any:
    return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]
