"""Hooks of the plugin `placement`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.host.upstream.checkpoints import to_resume
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.events import Event
from verl_fuse.spec.timeline import Timeline
from verl_fuse_placement.config import PlacementConfig
from verl_fuse_placement.contracts import CONTRACTS
from verl_fuse_placement.features import FEATURES
from verl_fuse_placement.refusals import AUTO, PLACED, devices_of, refusals

if TYPE_CHECKING:
    from verl_fuse_placement.chosen import PlacementChoice


def deferred(host: Any, groups: Mapping[str, Any]) -> Any:
    """Return the part that defers the critic's update. It needs verl, and is imported when it is made."""
    from verl_fuse_placement.deferred import deferred_critic

    return deferred_critic(host, groups)


class PlacementPlugin(Configured):
    """Say where the critic is, or choose it where the block asks for that; the host places the critic."""

    HOOK_API = 2
    block, features, refused = PlacementConfig, FEATURES, staticmethod(refusals)

    def __init__(self) -> None:
        self._chosen: PlacementChoice | None = None

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return CONTRACTS if config is None or self._chosen is not None or getter(config)(PLACED) else ()

    @hookimpl
    def fuse_overrides(self, config: Mapping[str, Any], run_dir: Path) -> Mapping[str, Any]:
        get = getter(config)
        if get(PLACED) != AUTO:
            return {}
        # Numba takes a second to import, and only a choice needs Numba.
        from verl_fuse_placement.chosen import PlacementChoice

        self._chosen = PlacementChoice(get, to_resume(config))
        return self._chosen.keys

    @hookimpl
    def fuse_worker_class(self, model: str, base: type, config: Mapping[str, Any]) -> type | None:
        if model != "critic" or self._chosen is None:
            return None
        # torch comes with the extra `verl`; planning works without.
        from verl_fuse_placement.resized import resized_worker_class

        return resized_worker_class(base)

    @hookimpl
    def fuse_devices(self, model: str, config: Mapping[str, Any]) -> range | None:
        return devices_of(getter(config)) if model == "critic" else None

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: PlacementConfig = trainer.block("placement")
        if self._chosen is not None:
            self._chosen.set_up(trainer)
        if block.critic is not None and block.defer:
            trainer.add_part(deferred)

    @hookimpl
    def fuse_event(self, event: Event) -> None:
        if self._chosen is not None:
            self._chosen.observe(event)

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float]:
        return {} if self._chosen is None else self._chosen.metrics()
