"""Hooks of the plugin `elastic`."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Capacity, Event, Migration, Refusal, ReplicaView, RolloutView
from verl_fuse.spec.timeline import Timeline
from verl_fuse_elastic.added import add
from verl_fuse_elastic.assignment import TOKENS_ALONE, Line, assign
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.contracts import CONTRACTS
from verl_fuse_elastic.learned import KEPT, ElasticHistory
from verl_fuse_elastic.ledger import Ledger, ledger, starting
from verl_fuse_elastic.prediction import calibration
from verl_fuse_elastic.prefixes import prefill_metrics
from verl_fuse_elastic.release import released, without_room
from verl_fuse_elastic.scaling import Forecast, Terms, choose, forecast, forecasts

HOOK_API = 1

logger = logging.getLogger(__name__)


@dataclass
class State:
    """What the plugin knows: what earlier steps taught, the replicas that hold devices, how many are wanted, and of the
    running step the forecast it was planned on, how one is made, and the response tokens it trains."""

    learned: ElasticHistory = field(default_factory=ElasticHistory)
    replicas: int = 0
    devices: int = 1
    capacity: Capacity = field(default_factory=lambda: Capacity(1))
    limit: float = math.inf
    running: int = 0
    foretell: Callable[[Sequence[Prompt]], Forecast] | None = None
    forecast: Forecast | None = None
    decision_seconds: float = 0.0
    calibration: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    without_room: bool = False


_active = ElasticConfig()
_state = State()


@hookimpl
def fuse_config() -> type:
    return ElasticConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    def get(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]

    if not get("fuse.elastic.enabled"):
        return None
    problems = []
    mode = get("trainer.v1.trainer_mode")
    if mode != "fuse":
        allowed = "fuse.elastic.enabled=true needs trainer.v1.trainer_mode=fuse"
        problems.append(Refusal("trainer.v1.trainer_mode", mode, allowed))
    rollout = "actor_rollout_ref.rollout"
    for key, value, allowed in (
        ("name", "vllm", "fuse.elastic.enabled=true needs vllm: routing has not been run with another engine"),
        ("full_determinism", False, "fuse.elastic.enabled=true needs false: both decide where a request runs"),
        ("router_config_path", None, "fuse.elastic.enabled=true needs null: both decide where a request runs"),
    ):
        if (get(f"{rollout}.{key}") or value) != value:
            problems.append(Refusal(f"{rollout}.{key}", get(f"{rollout}.{key}"), allowed))
    return [*problems, *_scaling_problems(get), *_standalone_problems(get)]


def _scaling_problems(get: Any) -> list[Refusal]:
    block = "fuse.elastic"
    problems = []
    least, most = get(f"{block}.min_replicas"), get(f"{block}.max_replicas")
    if least is not None and most is not None and least > most:
        problems.append(Refusal(f"{block}.min_replicas", least, f"at most {block}.max_replicas, which is {most}"))
    cut = get(f"{block}.cut_fraction")
    if cut is not None and cut < 1 and not get(f"{block}.release"):
        allowed = f"needs {block}.release=true: a replica that is not released keeps its requests"
        problems.append(Refusal(f"{block}.cut_fraction", cut, allowed))
    threshold = get("fuse.interstage.enabled") and get("fuse.interstage.migration_threshold")
    for key in ("scale", "release"):
        if get(f"{block}.{key}") and threshold:
            allowed = f"needs {block}.{key}=false: both decide which replicas generate"
            problems.append(Refusal("fuse.interstage.migration_threshold", threshold, allowed))
    return problems


def _standalone_problems(get: Any) -> list[Refusal]:
    if not get("fuse.elastic.standalone"):
        return []
    model, needs = "actor_rollout_ref.model", "fuse.elastic.standalone needs"
    problems = []
    ranks = [key for key in (f"{model}.lora_rank", f"{model}.lora.rank") if get(key)]
    if ranks and not get(f"{model}.lora.merge"):
        problems.append(
            Refusal(ranks[0], get(ranks[0]), f"{needs} {model}.lora.merge=true: an adapter alone is not sent")
        )
    key = "actor_rollout_ref.rollout.disaggregation.enabled"
    if get(key):
        problems.append(Refusal(key, True, f"{needs} false: such a replica has servers of two kinds"))
    return problems


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    return CONTRACTS


@hookimpl
def fuse_setup(trainer: Any) -> None:
    global _active, _state
    _active, _state = trainer.settings.blocks["elastic"], State()
    if not _active.enabled:
        return
    views = trainer.replicas.views()
    _state.replicas = _state.running = len(views)
    _state.capacity = min((view.capacity for view in views), key=lambda capacity: capacity.tokens)
    _state.devices = trainer.replicas.devices_each
    _state.limit = trainer.config.actor_rollout_ref.rollout.response_length
    for key in ("min_replicas", "max_replicas"):
        if (wanted := getattr(_active, key) or 0) > _state.replicas + _active.standalone:
            more = f", and fuse.elastic.standalone={_active.standalone}" if _active.standalone else ""
            raise FuseError(f"fuse.elastic.{key}={wanted}: this run has {_state.replicas} rollout replicas{more}")
    trainer.use_routing(_active.warm_prefix_tokens)
    if _active.standalone:
        trainer.use_standalone(_active.standalone, _active.standalone_timeout)


@hookimpl
def fuse_predict(prompts: Sequence[Prompt]) -> Sequence[Prediction] | None:
    return _state.learned.predictor.predict(prompts) if _active.enabled else None


@hookimpl
def fuse_scale(prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int | None:
    if not _active.enabled:
        return None
    begun = time.perf_counter()
    resident = sum(not replica.standalone for replica in replicas)
    most = min(most, _active.max_replicas or most)
    least = min(_active.min_replicas, most) if _active.scale else most
    launch = _state.learned.launch_seconds
    terms = Terms(_active.cost_weight, least, most, _active.start_seconds, _active.hysteresis, resident, launch)
    count = max(least, min(len(replicas), most))
    decode, running, release = _state.learned.decode, _state.running, _active.release
    if decode is not None and prompts and all(prompt.prediction is not None for prompt in prompts):
        line = partial(Line, slots=_slots(replicas), cost=decode, limit=_state.limit)
        count = choose(forecasts(line(prompts), terms, running, released=release), terms, running).count
        # Those that are missing are created while this step runs on those there are.
        there = min(count, len(replicas))
        _state.foretell = lambda prompts: forecast(line(prompts), there, terms, running, released=release)
        _state.forecast = _state.foretell(prompts)
    _state.running = count
    _state.decision_seconds = time.perf_counter() - begun
    return count


@hookimpl
def fuse_migration(view: RolloutView) -> Migration | None:
    if not (_active.enabled and _active.release):
        return None
    migration = released(view, _active.cut_fraction)
    if migration is None and not _state.without_room and without_room(view, _active.cut_fraction):
        _state.without_room = True
        routed = [replica for replica in view.replicas if replica.routed]
        found = ", ".join(f"replica {r.rank} runs {r.running} and has room for {r.slots}" for r in routed)
        logger.info("step %d: a replica past fuse.elastic.cut_fraction keeps its requests: %s", view.step, found)
    return migration


@hookimpl
def fuse_assign(
    prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
) -> Mapping[str, int] | None:
    if not _active.enabled:
        return None
    terms = _slots(replicas), _state.learned.decode or TOKENS_ALONE, _state.limit
    if any(running.values()):
        return add(prompts, running, *terms)
    return assign(prompts, [replica.rank for replica in replicas], *terms)


def _slots(replicas: Sequence[ReplicaView]) -> int:
    """Sequences any replica runs at once, by the lengths of recent steps."""
    return min((replica.slots for replica in replicas), default=1)


@hookimpl
def fuse_event(event: Event) -> None:
    if not _active.enabled:
        return
    if event.kind == "setup":
        _state.learned = KEPT.load(event.data["resumed_from"], _state.devices) or ElasticHistory()
    elif event.kind == "step_begin":
        _state.foretell, _state.forecast, _state.calibration = None, None, {}
        _state.without_room = False
    elif event.kind == "poll" and event.view is not None:
        # Whoever decided how many there are.
        _state.replicas = len(event.view.replicas)
    elif event.kind == "generated":
        _learn(event.data["prompts"], event.data["responses"], event.data["discarded"])
    elif event.kind == "checkpoint":
        _state.learned.save(Path(event.data["folder"]), _state.devices)
    elif event.kind == "step_end" and event.timeline is not None:
        _state.learned.learn_costs(event.timeline, _state.capacity)


def _learn(
    prompts: Mapping[str, Prompt], responses: Mapping[str, Sequence[int]], discarded: Mapping[str, Sequence[int]]
) -> None:
    """What was generated teaches lengths, trained on or not. A step that asked for more prompts is foretold as if all
    had been there at its begin."""
    visits = [(prompts[uid], lengths) for uid, lengths in {**discarded, **responses}.items() if uid in prompts]
    predicted = [(prompt.prediction, lengths) for prompt, lengths in visits if prompt.prediction is not None]
    _state.calibration = calibration(predicted)
    _state.tokens = sum(map(sum, responses.values()))
    if discarded and _state.foretell is not None:
        _state.forecast = _state.foretell([prompt for prompt in prompts.values() if prompt.prediction is not None])
    _state.learned.predictor.observe(visits)


@hookimpl
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    if not _active.enabled:
        return None
    spent = ledger(timeline, _state.replicas)
    found = {**prefill_metrics(timeline), **_state.calibration}
    return found if spent is None else {**found, **_cost_metrics(timeline, spent), **_decision_metrics(timeline, spent)}


def _cost_metrics(timeline: Timeline, spent: Ledger) -> dict[str, float]:
    devices = _state.devices
    created = sum(starting(timeline))
    paid = devices * (_state.replicas * (timeline.end - timeline.start) - spent.parked + created)
    return {
        "fuse/elastic_replicas": float(spent.used),
        "fuse/device_seconds_busy": devices * spent.busy,
        "fuse/device_seconds_idle": devices * spent.idle,
        "fuse/device_seconds_parked": devices * spent.parked,
        "fuse/device_seconds_starting": devices * created,
        "fuse/elastic_without_room": float(_state.without_room),
        **({"fuse/cost_per_million_tokens": 1e6 * _active.price * paid / _state.tokens} if _state.tokens else {}),
    }


def _decision_metrics(timeline: Timeline, spent: Ledger) -> dict[str, float]:
    if _state.forecast is None:
        return {}
    logger.info(
        "step %d: %d of %d replicas; generation %.2f s predicted, %.2f s measured; replica-seconds held %.2f predicted, %.2f measured",
        timeline.step, _state.forecast.count, _state.replicas, _state.forecast.seconds, spent.seconds,
        _state.forecast.replica_seconds, spent.held,
    )  # fmt: skip
    return {
        "fuse/elastic_predicted_seconds": _state.forecast.seconds,
        "fuse/elastic_seconds": spent.seconds,
        "fuse/elastic_predicted_device_seconds": _state.devices * _state.forecast.replica_seconds,
        "fuse/elastic_device_seconds": _state.devices * spent.held,
        "fuse/elastic_decision_seconds": _state.decision_seconds,
    }
