"""Hooks of the plugin `interstage`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.step import Event, LaneView, Migration, Refusal, RequestView, RolloutView
from verl_fuse.spec.timeline import Timeline, overlap_seconds, union_seconds
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.contracts import CONTRACTS
from verl_fuse_interstage.measured import stage_seconds
from verl_fuse_interstage.migration import Trigger, configured, tail_migration
from verl_fuse_interstage.policy import next_micro_group

if TYPE_CHECKING:
    from verl_fuse.simulate.threshold import Threshold
    from verl_fuse_interstage.auto import AutoThreshold

HOOK_API = 1


@dataclass
class State:
    """What the plugin knows of the running step: the automatic threshold, if there is one, prompts by data set, and what it chose for which step."""

    auto: "AutoThreshold | None" = None
    prompts: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    chosen: "Threshold | None" = None


_active = InterstageConfig()
_state = State()


@hookimpl
def fuse_config() -> type:
    return InterstageConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    def get(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]

    if not get("fuse.interstage.enabled"):
        return _connector_problems(get)
    problems = []
    mode = get("trainer.v1.trainer_mode")
    if mode != "fuse":
        problems.append(
            Refusal("trainer.v1.trainer_mode", mode, "fuse.interstage.enabled=true needs trainer.v1.trainer_mode=fuse")
        )
    for key in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
        if get(key):
            problems.append(
                Refusal(
                    key,
                    True,
                    "not yet with fuse.interstage.enabled=true: groups may be dropped while their samples are in inference; switch one of the two off",
                )
            )
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        problems.append(
            Refusal(
                "reward.reward_model.enable_resource_pool",
                False,
                "fuse.interstage.enabled=true needs the reward model in its own pool (true): a colocated one uses the same workers",
            )
        )
    if get("trainer.v1.sampler.custom_sampler.path"):
        allowed = "not yet with fuse.interstage.enabled=true: a sampler of your own may drop groups whose samples are in inference"
        problems.append(
            Refusal("trainer.v1.sampler.custom_sampler.path", get("trainer.v1.sampler.custom_sampler.path"), allowed)
        )
    for engine in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        key = f"{engine}.megatron.virtual_pipeline_model_parallel_size"
        if (get(key) or 1) > 1:
            problems.append(
                Refusal(
                    key,
                    get(key),
                    "not yet with fuse.interstage.enabled=true: micro-groups do not fit virtual pipeline stages; use null",
                )
            )
    return [*problems, *_migration_problems(get), *_slice_problems(get), *_connector_problems(get)]


def _connector_problems(get: Any) -> list[Refusal]:
    """Whatever else is switched on: trainer mode `fuse` tells a KV connector something with every request."""
    key, told = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config", "fuse.interstage.kv_transfer_params"
    if not get(key) or get("trainer.v1.trainer_mode") != "fuse":
        return []
    params, problems = get(told), []
    if params is None or (params and "{weights}" not in str(_plain(params))):
        allowed = (
            f"with a KV connector {told} must say what it is told with a request, and {{weights}} must be in it: KV it keeps outside the engine would "
            "otherwise be that of older weights (at least {}, for a connector that keeps none)"
        )
        problems.append(Refusal(*((key, get(key)) if params is None else (told, params)), allowed))
    migrates = get("fuse.interstage.enabled") and get("fuse.interstage.migration_threshold")
    if migrates and "MooncakeStoreConnector" in str(_plain(get(key))):
        allowed = "not with fuse.interstage.migration_threshold: vLLM empties the whole Mooncake store when one replica is freed, while others load from it"
        problems.append(Refusal(key, get(key), allowed))
    return problems


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


def _slice_problems(get: Any) -> list[Refusal]:
    if get("fuse.interstage.layout") != "slices":
        return []
    problems = []
    for engine in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        strategy = get(f"{engine}.strategy")
        if strategy not in (None, "fsdp", "fsdp2"):
            allowed = "fuse.interstage.layout=slices needs fsdp or fsdp2: copies of another engine's weights are not built yet"
            problems.append(Refusal(f"{engine}.strategy", strategy, allowed))
    model = "actor_rollout_ref.model"
    for key in ("lora_rank", "lora.rank", "lora_adapter_path"):
        if get(f"{model}.{key}"):
            allowed = "fuse.interstage.layout=slices needs a model without LoRA: adapters are not copied to slices yet"
            problems.append(Refusal(f"{model}.{key}", get(f"{model}.{key}"), allowed))
    return problems


def _migration_problems(get: Any) -> list[Refusal]:
    threshold = get("fuse.interstage.migration_threshold")
    if not threshold:
        return []
    problems = []
    if threshold == "auto" and get("fuse.interstage.layout") != "slices":
        allowed = "auto needs fuse.interstage.layout=slices: without slices nothing is gained by freeing replicas"
        problems.append(Refusal("fuse.interstage.migration_threshold", threshold, allowed))
    if isinstance(threshold, float) and threshold > 1:
        allowed = "a fraction of the step's samples (0.0 to 1.0), a whole number of samples, auto, or null"
        problems.append(Refusal("fuse.interstage.migration_threshold", threshold, allowed))
    rollout = "actor_rollout_ref.rollout"
    for key, value, allowed in (
        ("name", "vllm", "migration needs vllm: it has not been run with another engine"),
        (
            "full_determinism",
            False,
            "migration needs false: a seeded request starts its random numbers anew where it goes on",
        ),
        ("disaggregation.enabled", False, "migration needs false: a prefill server alone cannot finish a request"),
    ):
        if (get(f"{rollout}.{key}") or value) != value:
            problems.append(Refusal(f"{rollout}.{key}", get(f"{rollout}.{key}"), allowed))
    return problems


@hookimpl
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:
    return CONTRACTS


@hookimpl
def fuse_setup(trainer: Any) -> None:
    global _active, _state
    _active, _state = trainer.settings.blocks["interstage"], State()
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
        _state.auto = AutoThreshold(len(views), min(view.slots for view in views), longest)
        _state.auto.warm_up()


@hookimpl
def fuse_infer_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    return next_micro_group(_active, view, lane) if _active.enabled else None


@hookimpl
def fuse_migration(view: RolloutView) -> Migration | None:
    return tail_migration(_trigger(view), view) if _active.enabled else None


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
    return None if params is None else _filled(_plain(params), request.weights)


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
    if event.kind == "submitted":
        _state.prompts = event.data["prompts"]
    elif event.kind == "step_end" and _state.auto is not None and event.timeline is not None:
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
    requests = [span for span in timeline.spans if span.name == "request"]
    return {
        "fuse/migrations": float(sum(span.args.get("stop_reason") == "aborted" for span in requests)),
        "fuse/reprefilled_tokens": float(
            sum(
                int(span.args["prompt_tokens"]) - int(span.args.get("cached_tokens", 0))
                for span in requests
                if "resumed_tokens" in span.args
            )
        ),
        **_auto_metrics(timeline),
        "fuse/overlap_seconds": hidden,
        "fuse/overlap_fraction": hidden / total if total else 0.0,
        "fuse/streamed_samples": float(sum(groups.values())),
    }


def _auto_metrics(timeline: Timeline) -> dict[str, float]:
    if _state.auto is None or _state.chosen is None or _state.step != timeline.step:
        return {}
    measured = stage_seconds(timeline)
    return {
        "fuse/migration_threshold": float(_state.chosen.threshold),
        "fuse/predicted_stage_seconds": _state.chosen.seconds,
        "fuse/predicted_stock_seconds": _state.chosen.stock_seconds,
        "fuse/threshold_decision_seconds": _state.auto.decision_seconds,
        **({} if measured is None else {"fuse/stage_seconds": measured}),
    }
