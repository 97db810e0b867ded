"""Refuse configurations that a fused update does not serve, before anything is started."""

import math
from collections.abc import Iterator

from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    Get,
    has_critic,
    needed_beside,
    of_mode_fuse,
    off_beside,
    required,
    training_devices,
)
from verl_fuse.spec.step import Refusal

_NEEDS = "fuse.pipeline.enabled=true"
# Keys of an engine's configuration that must be off, their value then, and the text of the refusal: only Megatron's own
# schedules serve these features, or nobody ran them fused.
_OFF = {
    "virtual_pipeline_model_parallel_size": (1, "1, or null"),
    "expert_model_parallel_size": (
        1,
        "1, or null: experts on other ranks are asked in the middle of an operation, "
        "and a fused schedule does not keep copies of a pipeline in step",
    ),
    "dynamic_context_parallel": (False, "false"),
    "use_megatron_fsdp": (False, "false"),
    "qat.enable": (False, "false"),
    "router_replay.mode": ("disabled", "disabled"),
    "override_transformer_config.fp8": (None, "null: it pads micro-batches by rules of its own"),
    **{
        f"override_transformer_config.{name}": (value, f"{said}: Megatron's own schedules alone do it")
        for name, value, said in (
            ("defer_embedding_wgrad_compute", False, "false"),
            ("fine_grained_activation_offloading", False, "false"),
            ("num_microbatches_with_partial_activation_checkpoints", None, "null"),
        )
    },
}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot train both models in one pipeline."""
    if enabled(get):
        yield from of_mode_fuse(get, _NEEDS)
        if not has_critic(get):
            key = "algorithm.adv_estimator"
            allowed = f"{_NEEDS} trains an actor and a critic together: gae, or set it to false"
            yield Refusal(key, get(key), allowed)
        yield from _models(get)


def enabled(get: Get) -> bool:
    """Tell whether both models are trained in one pipeline."""
    return bool(get("fuse.pipeline.enabled"))


def _models(get: Get) -> Iterator[Refusal]:
    allowed = (
        f"{_NEEDS} needs Megatron engines (model_engine=megatron): FSDP's have no pipeline to fuse, they train "
        "serially; set it to false"
    )
    others = [key for key in (f"{ACTOR}.strategy", f"{CRITIC}.strategy") if get(key) != "megatron"]
    for key in others:
        yield Refusal(key, get(key), allowed)
    # Megatron's settings are nobody's where no engine is Megatron's.
    if get("fuse.pipeline.schedule") != "serial" and len(others) < 2:
        yield from _engines(get)
    yield from _environment(get)


def _engines(get: Get) -> Iterator[Refusal]:
    for role in (ACTOR, CRITIC):
        yield from needed_beside(get, _NEEDS, {f"{role}.megatron.{key}": need for key, need in _OFF.items()})
        key = f"{role}.megatron.pipeline_model_parallel_size"
        if (get(key) or 1) < 2:
            yield Refusal(key, get(key), f"{_NEEDS} needs a pipeline of at least 2 stages")
    for model in ("actor_rollout_ref.model", "critic.model"):
        off = {f"{model}.lora_rank": 0, f"{model}.lora.rank": 0, f"{model}.mtp.enable": False}
        yield from off_beside(get, _NEEDS, off)
    widths = {role: _product(get, role, "tensor", "context") for role in (ACTOR, CRITIC)}
    if widths[ACTOR] != widths[CRITIC]:
        key = f"{CRITIC}.megatron.tensor_model_parallel_size"
        allowed = (
            f"{_NEEDS} needs stages of as many ranks (tensor x context parallel) as the actor's: {widths[ACTOR]}, "
            f"not {widths[CRITIC]}"
        )
        yield Refusal(key, get(key), allowed)
    yield from required(get, {"global_profiler.steps": (None, f"{_NEEDS} needs null")})


def _environment(get: Get) -> Iterator[Refusal]:
    ranks = training_devices(get)
    for role in (ACTOR, CRITIC):
        size = _product(get, role, "tensor", "pipeline", "context")
        if ranks % size:
            key = f"{role}.megatron.pipeline_model_parallel_size"
            yield Refusal(key, get(key), f"{size} ranks per copy of the model do not divide the {ranks} there are")
    if get("critic.enable") is not False and get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal("actor_rollout_ref.hybrid_engine", False, f"{_NEEDS} needs true")


def _product(get: Get, role: str, *kinds: str) -> int:
    keys = ("context_parallel_size" if kind == "context" else f"{kind}_model_parallel_size" for kind in kinds)
    return math.prod(get(f"{role}.megatron.{key}") or 1 for key in keys)
