"""Hooks of the plugin `placement`."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_fuse.hookspecs import Trainer, hookimpl
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Refusal
from verl_fuse_placement.config import PlacementConfig
from verl_fuse_placement.contracts import CONTRACTS
from verl_fuse_placement.refusals import devices_of, refusals


class PlacementPlugin:
    """Says where the critic is; what places and defers it is in the host."""

    HOOK_API = 2

    @hookimpl
    def fuse_config(self) -> type:
        return PlacementConfig

    @hookimpl
    def fuse_validate(self, config: Mapping[str, Any]) -> Sequence[Refusal]:
        return list(refusals(getter(config)))

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return CONTRACTS if config is None or devices_of(getter(config)) is not None else ()

    @hookimpl
    def fuse_devices(self, model: str, config: Mapping[str, Any]) -> range | None:
        return devices_of(getter(config)) if model == "critic" else None

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: PlacementConfig = trainer.block("placement")
        if block.critic is not None and block.defer:
            trainer.use_deferred_critic()
