"""Hooks of the plugin `observe`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.step import Event
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.summary import summarize
from verl_fuse_observe.config import ObserveConfig
from verl_fuse_observe.metrics import step_metrics
from verl_fuse_observe.observer import Observer

HOOK_API = 1

_config = ObserveConfig()
_observer: Observer | None = None


@hookimpl
def fuse_config() -> type:
    return ObserveConfig


@hookimpl
def fuse_setup(trainer: Any) -> None:
    global _config
    _config = trainer.block("observe")


@hookimpl
def fuse_event(event: Event) -> None:
    global _observer
    if not _config.enabled:
        return
    if event.kind == "setup":
        _observer = Observer(_config, Path(event.data["run_dir"]), event.data)
    elif _observer is None:
        raise FuseError(f"event {event.kind!r} of step {event.step} came before the event 'setup'")
    else:
        _observer.observe(event)


@hookimpl
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    if not _config.enabled:
        return None
    failures = {} if _observer is None else {"fuse/timeline_write_failures": float(_observer.write_failures())}
    return step_metrics(summarize(timeline)) | failures
