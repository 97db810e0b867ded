"""The plugin `cpu`: refuses configurations that cannot run without an accelerator, and clears what dead runs left behind."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_cpu import checks
from verl_fuse_cpu.contracts import CONTRACTS
from verl_fuse_cpu.environment import active
from verl_fuse_cpu.leftovers import remove_leftovers
from verl_fuse_patches import registry

HOOK_API = 1

logger = logging.getLogger(__name__)


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    def get(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]

    if get("trainer.device") != "cpu" and not active():
        return None
    return [problem for check in checks.CHECKS for problem in check(get)]


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    if config is not None and not active():
        return ()
    return (*CONTRACTS, *registry.contracts())


@hookimpl
def fuse_setup(trainer: Any) -> None:
    if active():
        for path in remove_leftovers():
            logger.warning("removed %s, left by a dead run", path)
