"""Hooks of the plugin `observe`."""

from collections.abc import Mapping

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Trainer, hookimpl
from verl_fuse.spec.events import Event, SetUp
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.summary import summarize
from verl_fuse_observe.config import ObserveConfig
from verl_fuse_observe.metrics import step_metrics
from verl_fuse_observe.observer import Observer


class ObservePlugin:
    """Follow a run that has `fuse.observe` switched on."""

    HOOK_API = 2

    def __init__(self) -> None:
        self._config = ObserveConfig()
        self._observer: Observer | None = None

    @hookimpl
    def fuse_config(self) -> type:
        return ObserveConfig

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        self._config = trainer.block("observe")

    @hookimpl
    def fuse_event(self, event: Event) -> None:
        if not self._config.enabled:
            return
        if isinstance(event, SetUp):
            self._observer = Observer(self._config, event)
        elif self._observer is None:
            raise FuseError(f"the event {type(event).__name__} of step {event.step} came before SetUp")
        else:
            self._observer.observe(event)

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float] | None:
        if not self._config.enabled:
            return None
        if (seen := self._observer) is None:
            return step_metrics(summarize(timeline))
        return step_metrics(seen.summary(timeline)) | {"fuse/timeline_write_failures": float(seen.write_failures())}
