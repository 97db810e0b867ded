"""What a sync of shards does not do, refused before anything is started."""

from collections.abc import Callable, Iterator
from typing import Any

from verl_fuse.spec.step import Refusal

Get = Callable[[str], Any]

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
_NEEDS = "fuse.realloc.weight_sync=shards"
DTYPES = ("bfloat16", "float16", "float32")
# key: the value it must have, and why.
_REQUIRED: dict[str, tuple[Any, str]] = {
    "trainer.v1.trainer_mode": ("fuse", "verl-fuse's workers send the shards"),
    f"{ROLLOUT}.name": ("vllm", "what other engines load is not known here"),
}
# What must be off, and its value then: the rollout would load something else than the trained parameters, cut otherwise.
_OFF: dict[str, Any] = {
    f"{ROLLOUT}.quantization": None,
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.expert_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.disaggregation.enabled": False,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora.rank": 0,
    f"{MODEL}.mtp.enable": False,
}
# The same of each engine that is known here: its shards would be others than those known here, or not there at the time of a sync.
_OFF_IN: dict[str, dict[str, Any]] = {
    "fsdp2": {f"{ACTOR}.fsdp_config.qat.enable": False},
    "megatron": {
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": 1,
        f"{MEGATRON}.expert_model_parallel_size": 1,
        f"{MEGATRON}.context_parallel_size": 1,
        f"{MEGATRON}.dynamic_context_parallel": False,
        f"{MEGATRON}.use_megatron_fsdp": False,
        f"{MEGATRON}.param_offload": False,
        f"{MEGATRON}.qat.enable": False,
        f"{MEGATRON}.override_transformer_config.fp8": None,
        f"{MEGATRON}.override_transformer_config.pipeline_model_parallel_layout": None,
    },
}


def refusals(get: Get) -> Iterator[Refusal]:
    """What keeps this configuration from sending shards to its rollout."""
    for key, (value, why) in _REQUIRED.items():
        if get(key) != value:
            yield Refusal(key, get(key), f"{_NEEDS} needs {value}: {why}")
    engine = get(f"{ACTOR}.strategy")
    if engine not in _OFF_IN:
        allowed = f"{_NEEDS} needs {' or '.join(_OFF_IN)}: the shards of other engines are not known here"
        yield Refusal(f"{ACTOR}.strategy", engine, allowed)
    for key, off in (_OFF | _OFF_IN.get(engine, {})).items():
        if (get(key) or off) != off:
            yield Refusal(key, get(key), f"not with {_NEEDS}: {off}")
    key = f"{ROLLOUT}.dtype"
    if get(key) not in DTYPES:
        yield Refusal(key, get(key), f"{_NEEDS} needs {', '.join(DTYPES)}")
    if get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal("actor_rollout_ref.hybrid_engine", False, f"{_NEEDS} needs true")
