"""Hooks of the plugin `cpu`, which refuses configurations that cannot run without an accelerator, and removes the
weight buffers of dead runs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fuse.hookspecs import Trainer, hookimpl
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_cpu.contracts import CONTRACTS
from verl_fuse_cpu.environment import active
from verl_fuse_cpu.leftovers import remove_leftovers
from verl_fuse_cpu.refusals import refusals
from verl_fuse_patches import registry

logger = logging.getLogger(__name__)


class CpuPlugin:
    """Refuse, check and clean up; do nothing in a run on another platform."""

    HOOK_API = 2

    @hookimpl
    def fuse_validate(self, config: Mapping[str, Any]) -> Sequence[Refusal]:
        return list(refusals(getter(config)))

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return () if config is not None and not active() else (*CONTRACTS, *registry.contracts())

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        if active():
            for path in remove_leftovers():
                logger.warning("removed %s, left by a dead run", path)
