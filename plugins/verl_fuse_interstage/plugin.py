"""Hooks of the plugin `interstage`."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.step import LaneView, Problem, RolloutView
from verl_fuse.spec.timeline import Timeline, overlap_seconds, union_seconds
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.policy import next_micro_group

HOOK_API = 1

_active = InterstageConfig()


@hookimpl
def fuse_config() -> type:
    return InterstageConfig


@hookimpl
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Problem] | None:
    def get(key: str) -> Any:
        return OmegaConf.select(config, key, default=None)  # type: ignore[arg-type]

    if not get("fuse.interstage.enabled"):
        return None
    problems = []
    mode = get("trainer.v1.trainer_mode")
    if mode != "fuse":
        problems.append(
            Problem("trainer.v1.trainer_mode", mode, "fuse.interstage.enabled=true needs trainer.v1.trainer_mode=fuse")
        )
    for key in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
        if get(key):
            problems.append(
                Problem(
                    key,
                    True,
                    "not yet with fuse.interstage.enabled=true: groups may be dropped while their samples are in inference; switch one of the two off",
                )
            )
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        problems.append(
            Problem(
                "reward.reward_model.enable_resource_pool",
                False,
                "fuse.interstage.enabled=true needs the reward model in its own pool (true): a colocated one uses the same workers",
            )
        )
    if get("trainer.v1.sampler.custom_sampler.path"):
        allowed = "not yet with fuse.interstage.enabled=true: a sampler of your own may drop groups whose samples are in inference"
        problems.append(
            Problem("trainer.v1.sampler.custom_sampler.path", get("trainer.v1.sampler.custom_sampler.path"), allowed)
        )
    for engine in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        key = f"{engine}.megatron.virtual_pipeline_model_parallel_size"
        if (get(key) or 1) > 1:
            problems.append(
                Problem(
                    key,
                    get(key),
                    "not yet with fuse.interstage.enabled=true: micro-groups do not fit virtual pipeline stages; use null",
                )
            )
    return problems


@hookimpl
def fuse_setup(trainer: Any) -> None:
    global _active
    _active = trainer.settings.blocks["interstage"]


@hookimpl
def fuse_infer_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    return next_micro_group(_active, view, lane) if _active.enabled else None


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
        "fuse/overlap_seconds": hidden,
        "fuse/overlap_fraction": hidden / total if total else 0.0,
        "fuse/streamed_samples": float(sum(groups.values())),
    }
