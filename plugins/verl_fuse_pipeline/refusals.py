"""What a fused update does not do, refused before anything is started."""

from collections.abc import Callable, Iterator
from typing import Any

from verl_fuse.spec.step import Refusal

Get = Callable[[str], Any]

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
_NEEDS = "fuse.pipeline.enabled=true"
# Of an engine's configuration: what only Megatron's own schedules do, or what was never run fused.
_SIZES = ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size")
_FLAGS = ("dynamic_context_parallel", "use_megatron_fsdp", "qat.enable", "param_offload", "optimizer_offload")


def refusals(get: Get) -> Iterator[Refusal]:
    """What keeps this configuration from training both models in one pipeline."""
    mode = get("trainer.v1.trainer_mode")
    if mode != "fuse":
        yield Refusal("trainer.v1.trainer_mode", mode, f"{_NEEDS} needs trainer.v1.trainer_mode=fuse")
    if not _has_critic(get):
        key = "algorithm.adv_estimator"
        yield Refusal(key, get(key), f"{_NEEDS} trains an actor and a critic together: gae, or set it to false")
        return
    for role in (ACTOR, CRITIC):
        key = f"{role}.strategy"
        if get(key) != "megatron":
            allowed = f"{_NEEDS} needs Megatron engines (model_engine=megatron): FSDP's have no pipeline to fuse, they train serially; set it to false"
            yield Refusal(key, get(key), allowed)
    if get("fuse.pipeline.schedule") == "serial":
        yield from _environment(get)
        return
    yield from _engines(get)
    yield from _environment(get)


def _engines(get: Get) -> Iterator[Refusal]:
    for role in (ACTOR, CRITIC):
        for size in _SIZES:
            key = f"{role}.megatron.{size}"
            if (get(key) or 1) > 1:
                yield Refusal(key, get(key), f"not with {_NEEDS}: 1, or null")
        for flag in _FLAGS:
            key = f"{role}.megatron.{flag}"
            if get(key):
                yield Refusal(key, True, f"not with {_NEEDS}: false")
        key = f"{role}.megatron.router_replay.mode"
        if (get(key) or "disabled") != "disabled":
            yield Refusal(key, get(key), f"not with {_NEEDS}: disabled")
        key = f"{role}.megatron.pipeline_model_parallel_size"
        if (get(key) or 1) < 2:
            yield Refusal(key, get(key), f"{_NEEDS} needs a pipeline of at least 2 stages")
    for model in ("actor_rollout_ref.model", "critic.model"):
        for key, off in ((f"{model}.lora_rank", 0), (f"{model}.lora.rank", 0), (f"{model}.mtp.enable", False)):
            if get(key):
                yield Refusal(key, get(key), f"not with {_NEEDS}: {off}")
    widths = {role: _product(get, role, "tensor", "context") for role in (ACTOR, CRITIC)}
    if widths[ACTOR] != widths[CRITIC]:
        key = f"{CRITIC}.megatron.tensor_model_parallel_size"
        allowed = f"{_NEEDS} needs stages of as many ranks (tensor x context parallel) as the actor's: {widths[ACTOR]}, not {widths[CRITIC]}"
        yield Refusal(key, get(key), allowed)
    if get("global_profiler.steps") is not None:
        yield Refusal("global_profiler.steps", get("global_profiler.steps"), f"not with {_NEEDS}: null")


def _environment(get: Get) -> Iterator[Refusal]:
    ranks = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    for role in (ACTOR, CRITIC):
        size = _product(get, role, "tensor", "pipeline", "context")
        if ranks % size:
            key = f"{role}.megatron.pipeline_model_parallel_size"
            yield Refusal(key, get(key), f"{size} ranks per copy of the model do not divide the {ranks} there are")
    if get("critic.enable") is not False and get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal("actor_rollout_ref.hybrid_engine", False, f"{_NEEDS} needs true")


def _product(get: Get, role: str, *kinds: str) -> int:
    size = 1
    for kind in kinds:
        key = "context_parallel_size" if kind == "context" else f"{kind}_model_parallel_size"
        size *= get(f"{role}.megatron.{key}") or 1
    return size


def _has_critic(get: Get) -> bool:
    """As verl decides it (verl.trainer.ppo.utils.need_critic)."""
    enabled = get("critic.enable")
    return bool(enabled) if enabled is not None else get("algorithm.adv_estimator") == "gae"
