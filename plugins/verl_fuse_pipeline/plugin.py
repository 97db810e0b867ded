"""Hooks of the plugin `pipeline`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_pipeline.config import PipelineConfig
from verl_fuse_pipeline.contracts import CONTRACTS
from verl_fuse_pipeline.refusals import refusals

HOOK_API = 1


@hookimpl
def fuse_config() -> type:
    return PipelineConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    if not _get(config, "fuse.pipeline.enabled"):
        return None
    return list(refusals(partial(_get, config)))


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    return CONTRACTS if config is None or _get(config, "fuse.pipeline.enabled") else ()


@hookimpl
def fuse_worker_class(model: str, base: type, config: Mapping[str, Any]) -> type | None:
    if not _get(config, "fuse.pipeline.enabled"):
        return None
    from verl_fuse.host.update.megatron.worker import pipeline_worker_class

    return pipeline_worker_class(model, base)


@hookimpl
def fuse_setup(trainer: Any) -> None:
    block: PipelineConfig = trainer.block("pipeline")
    if not block.enabled or block.schedule == "serial":
        return
    # The solvers take a second to import.
    from verl_fuse_pipeline.policy import fused_schedule

    solve = partial(fused_schedule, wanted=block.schedule, seconds=block.solve_seconds)
    trainer.use_fused_update(solve, block.timeout)


def _get(config: Mapping[str, Any], key: str) -> Any:
    return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]
