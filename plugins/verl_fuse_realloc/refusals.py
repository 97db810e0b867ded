"""Refuse configurations that a sync of shards does not serve, before anything is started."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.reshard.parameters import require_known
from verl_fuse.spec.composed import ACTOR, MODEL, ROLLOUT, Get, needed_beside, off_beside, required
from verl_fuse.spec.files import load_json
from verl_fuse.spec.step import Refusal

MEGATRON = f"{ACTOR}.megatron"
_NEEDS = "fuse.realloc.weight_sync=shards"
DTYPES = ("bfloat16", "float16", "float32")
_REQUIRED: dict[str, tuple[Any, str]] = {
    "trainer.v1.trainer_mode": ("fuse", f"{_NEEDS} needs fuse: verl-fuse's workers send the shards"),
    f"{ROLLOUT}.name": ("vllm", f"{_NEEDS} needs vllm: what other engines load is not known here"),
}
# Keys that must be off, and their value then: otherwise the rollout would load other weights than the trained
# parameters, or weights cut otherwise.
_OFF: dict[str, Any] = {
    f"{ROLLOUT}.quantization": None,
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.expert_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.disaggregation.enabled": False,
    f"{MODEL}.mtp.enable": False,
}
_ADAPTERS = (
    0,
    "0: with adapters verl's own sync sends the base once and then adapters alone, and whole adapters are what vLLM "
    "takes",
)
# The same for each engine that is known here: otherwise its shards would differ from the known ones, or be absent at
# the time of a sync.
_OFF_IN: dict[str, dict[str, Any]] = {
    "fsdp2": {f"{ACTOR}.fsdp_config.qat.enable": False},
    "megatron": {
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": 1,
        f"{MEGATRON}.context_parallel_size": 1,
        f"{MEGATRON}.dynamic_context_parallel": False,
        f"{MEGATRON}.use_megatron_fsdp": False,
        f"{MEGATRON}.qat.enable": False,
        f"{MEGATRON}.override_transformer_config.fp8": None,
        f"{MEGATRON}.override_transformer_config.pipeline_model_parallel_layout": None,
    },
}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.realloc` as set."""
    if not syncs(get):
        return
    yield from required(get, _REQUIRED)
    engine = get(f"{ACTOR}.strategy")
    if engine not in _OFF_IN:
        allowed = f"{_NEEDS} needs {' or '.join(_OFF_IN)}: the shards of other engines are not known here"
        yield Refusal(f"{ACTOR}.strategy", engine, allowed)
    yield from off_beside(get, _NEEDS, _OFF | _OFF_IN.get(engine, {}))
    yield from needed_beside(get, _NEEDS, {f"{MODEL}.lora_rank": _ADAPTERS, f"{MODEL}.lora.rank": _ADAPTERS})
    key, tensor = f"{MEGATRON}.expert_tensor_parallel_size", get(f"{MEGATRON}.tensor_model_parallel_size") or 1
    if engine == "megatron" and get(key) not in (None, tensor):
        yield Refusal(key, get(key), f"{_NEEDS} needs null, or {tensor}, as other parameters are cut")
    key = f"{ROLLOUT}.dtype"
    if get(key) not in DTYPES:
        yield Refusal(key, get(key), f"{_NEEDS} needs {', '.join(DTYPES)}")
    if get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal("actor_rollout_ref.hybrid_engine", False, f"{_NEEDS} needs true")
    yield from _family(get(f"{MODEL}.path"))


def syncs(get: Get) -> bool:
    """Tell whether shards are sent to the rollout."""
    return get("fuse.realloc.weight_sync") == "shards"


def _family(path: Any) -> Iterator[Refusal]:
    """Refuse a model that is not known, where its folder is on this machine: elsewhere the run's workers refuse it."""
    file = Path(str(path)).expanduser() / "config.json"
    if not path or not os.path.exists(file):
        return
    try:
        require_known(load_json(file), Path(path).name)
    except FuseError as error:
        yield Refusal(f"{MODEL}.path", path, f"{_NEEDS} needs a model that is known: {error}")
