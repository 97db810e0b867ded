"""Hooks of the plugin `interstage`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Event, LaneView, Migration, Refusal, RequestView, RolloutView
from verl_fuse.spec.timeline import Timeline, overlap_seconds, union_seconds
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.contracts import CONTRACTS
from verl_fuse_interstage.gains import in_force
from verl_fuse_interstage.learned import KEPT, InterstageHistory
from verl_fuse_interstage.measured import stage_seconds
from verl_fuse_interstage.migration import CAUSE, Trigger, configured, hindrance, tail_migration
from verl_fuse_interstage.policy import next_micro_group
from verl_fuse_interstage.refusals import plain, refusals
from verl_fuse_interstage.requests import request_metrics

if TYPE_CHECKING:
    from verl_fuse.simulate.threshold import Threshold
    from verl_fuse_interstage.auto import AutoThreshold

HOOK_API = 1

logger = logging.getLogger(__name__)


@dataclass
class State:
    """What the plugin knows of the running step: the automatic threshold, if there is one, on replicas of how many
    devices, prompts by data set, what it chose for which step, and what kept a tail that was due from moving."""

    auto: "AutoThreshold | None" = None
    devices: int = 1
    prompts: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    chosen: "Threshold | None" = None
    hindrances: set[str] = field(default_factory=set)


_active = InterstageConfig()
_state = State()


@hookimpl
def fuse_config() -> type:
    return InterstageConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    def get(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]

    return list(refusals(get))


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    return CONTRACTS


@hookimpl
def fuse_setup(trainer: Any) -> None:
    global _active, _state
    _active, _state = trainer.settings.blocks["interstage"], State()
    if not _active.enabled:
        return
    _active, left_out = in_force(_active, trainer.streamed_stages)
    if left_out:
        logger.warning(left_out)
    if not _active.enabled:
        return
    if _active.layout == "slices":
        trainer.use_slices()
    if _active.migration_threshold == "auto":
        # Numba takes a second to import, and only this needs it.
        from verl_fuse_interstage.auto import AutoThreshold

        rollout = trainer.config.actor_rollout_ref.rollout
        views = trainer.replicas.views()
        longest = rollout.prompt_length + rollout.response_length
        least = min((view.capacity for view in views), key=lambda capacity: capacity.tokens)
        _state.auto = AutoThreshold(len(views), least, longest)
        _state.auto.warm_up()
        _state.devices = trainer.replicas.devices_each


@hookimpl
def fuse_infer_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    return next_micro_group(_active, view, lane) if _active.enabled else None


@hookimpl
def fuse_migration(view: RolloutView) -> Migration | None:
    if not _active.enabled:
        return None
    trigger = _trigger(view)
    if (found := hindrance(trigger, view)) and found not in _state.hindrances:
        _state.hindrances.add(found)
        _log_hindrance(found, view)
    return tail_migration(trigger, view)


def _log_hindrance(found: str, view: RolloutView) -> None:
    about = {
        "room": [f"replica {replica.rank} has room for {replica.slots}" for replica in view.replicas],
        "unmovable": [f"replica {replica.rank} runs {replica.unmovable} that cannot move" for replica in view.replicas],
    }
    logger.info(
        "step %d: the last %d samples stay where they are, though %s asks for fewer replicas: %s",
        view.step, view.unfinished, CAUSE, ", ".join(about[found]),
    )  # fmt: skip


def _trigger(view: RolloutView) -> Trigger:
    if _state.auto is None:
        wanted = _active.migration_threshold
        return configured(None if wanted == "auto" else wanted, view.expected)
    if _state.step != view.step:
        each = view.expected // max(1, sum(_state.prompts.values()))
        samples = {source: prompts * each for source, prompts in _state.prompts.items()}
        _state.step, _state.chosen = view.step, _state.auto.choose(samples or {"": view.expected})
    return Trigger(0) if _state.chosen is None else Trigger(_state.chosen.threshold, _state.chosen.survivors)


@hookimpl
def fuse_transfer(request: RequestView, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    params = OmegaConf.select(config, "fuse.interstage.kv_transfer_params")  # type: ignore[arg-type]
    return None if params is None else _filled(plain(params), request.weights)


def _filled(value: Any, weights: str) -> Any:
    """`value` with the name of the weights in every string of it."""
    if isinstance(value, str):
        return value.replace("{weights}", weights)
    if isinstance(value, list):
        return [_filled(item, weights) for item in value]
    if isinstance(value, Mapping):
        return {key: _filled(item, weights) for key, item in value.items()}
    return value


@hookimpl
def fuse_event(event: Event) -> None:
    if event.kind == "step_begin":
        _state.hindrances = set()
    if _state.auto is None:
        return
    if event.kind == "setup":
        _state.auto.learned = KEPT.load(event.data["resumed_from"], _state.devices) or InterstageHistory()
    elif event.kind == "submitted":
        _state.prompts = event.data["prompts"]
    elif event.kind == "checkpoint":
        _state.auto.learned.save(Path(event.data["folder"]), _state.devices)
    elif event.kind == "step_end" and event.timeline is not None:
        _state.auto.learn(event.timeline, event.data["lengths"])


@hookimpl
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    generation = [(span.start, span.end) for span in timeline.on("step") if span.name == "gen"]
    inference = [
        (span.start, span.end)
        for track in timeline.tracks
        if track.startswith("lane ")
        for span in timeline.on(track)
        if span.category == "inference"
    ]
    hidden, total = overlap_seconds(generation, inference), union_seconds(inference)
    groups = {
        span.args["micro_group"]: int(span.args["samples"]) for span in timeline.spans if "micro_group" in span.args
    }
    return {
        **request_metrics(timeline),
        "fuse/tail_without_room": float("room" in _state.hindrances),
        **_auto_metrics(timeline),
        "fuse/overlap_seconds": hidden,
        "fuse/overlap_fraction": hidden / total if total else 0.0,
        "fuse/streamed_samples": float(sum(groups.values())),
    }


def _auto_metrics(timeline: Timeline) -> dict[str, float]:
    if _state.auto is None or _state.step != timeline.step:
        return {}
    measured = stage_seconds(timeline)
    logger.info("step %d: %s", timeline.step, _decision(_state.chosen, measured))
    if _state.chosen is None:
        return {}
    return {
        "fuse/migration_threshold": float(_state.chosen.threshold),
        "fuse/predicted_stage_seconds": _state.chosen.seconds,
        "fuse/predicted_stock_seconds": _state.chosen.stock_seconds,
        "fuse/threshold_decision_seconds": _state.auto.decision_seconds,
        **({} if measured is None else {"fuse/stage_seconds": measured}),
    }


def _decision(chosen: "Threshold | None", measured: float | None) -> str:
    """What was chosen for a step, what that promised, and what came of it."""
    took = "not measured" if measured is None else f"{measured:.2f} s measured"
    if chosen is None:
        return (
            f"migration threshold 0, decoding or inference has not been measured yet; generation and inference {took}"
        )
    kept = f"on {chosen.survivors} replicas" if chosen.threshold else "nothing migrates"
    return (
        f"migration threshold {chosen.threshold}, {kept}; generation and inference {chosen.seconds:.2f} s predicted "
        f"({chosen.stock_seconds:.2f} s without migration), {took}"
    )
