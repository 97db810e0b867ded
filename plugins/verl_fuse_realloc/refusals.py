"""Refuse configurations that a sync of shards, or a change of layouts, does not serve, before anything is started."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.reshard.parameters import require_known
from verl_fuse.spec.composed import ACTOR, MODEL, ROLLOUT, Get, has_critic, off_beside, required, required_if_set
from verl_fuse.spec.files import load_json
from verl_fuse.spec.model import Model
from verl_fuse.spec.step import Refusal
from verl_fuse_realloc.schedule import FSDP_SIZE, KEY, overrides_of, scheduled, sizes_of

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
    "0: with adapters verl's own sync sends the base once and then adapters alone, and whole adapters are what vLLM "
    "takes"
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
# Keys that must be off for a model whose layout changes, and their value then.
_OFF_OF: dict[str, dict[str, Any]] = {
    "actor": {
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.offload_policy": False,
        "actor_rollout_ref.actor.fsdp_config.qat.enable": False,
        "actor_rollout_ref.model.enable_activation_offload": False,
        "actor_rollout_ref.model.lora_rank": 0,
        "actor_rollout_ref.model.lora.rank": 0,
    },
    "critic": {
        "critic.fsdp.ulysses_sequence_parallel_size": 1,
        "critic.fsdp.offload_policy": False,
        "critic.fsdp.qat.enable": False,
        "critic.model.enable_activation_offload": False,
        "critic.model.lora_rank": 0,
        "critic.model.lora.rank": 0,
    },
}
_PATH = {"actor": f"{MODEL}.path", "critic": "critic.model.path"}
_STRATEGY = {"actor": "actor_rollout_ref.actor.strategy", "critic": "critic.strategy"}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.realloc` as set."""
    if syncs(get):
        yield from _shards(get)
    if scheduled(get):
        yield from _layouts(get)


def syncs(get: Get) -> bool:
    """Tell whether shards are sent to the rollout."""
    return get("fuse.realloc.weight_sync") == "shards"


def _shards(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot send shards to its rollout."""
    yield from required(get, _REQUIRED)
    engine = get(f"{ACTOR}.strategy")
    if engine not in _OFF_IN:
        allowed = f"{_NEEDS} needs {' or '.join(_OFF_IN)}: the shards of other engines are not known here"
        yield Refusal(f"{ACTOR}.strategy", engine, allowed)
    off = _OFF | _OFF_IN.get(engine, {})
    yield from off_beside(get, _NEEDS, off)
    adapters = (0, f"{_NEEDS} needs {_ADAPTERS}")
    yield from required_if_set(get, {f"{MODEL}.lora_rank": adapters, f"{MODEL}.lora.rank": adapters})
    key, tensor = f"{MEGATRON}.expert_tensor_parallel_size", get(f"{MEGATRON}.tensor_model_parallel_size") or 1
    if engine == "megatron" and get(key) not in (None, tensor):
        yield Refusal(key, get(key), f"{_NEEDS} needs null, or {tensor}, as other parameters are cut")
    key = f"{ROLLOUT}.dtype"
    if get(key) not in DTYPES:
        yield Refusal(key, get(key), f"{_NEEDS} needs {', '.join(DTYPES)}")
    if get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal("actor_rollout_ref.hybrid_engine", False, f"{_NEEDS} needs true")
    yield from _family(get, f"{MODEL}.path", _NEEDS, require_known)


def _layouts(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot change layouts as its schedule asks."""
    named: set[str] = set()
    for step, value in scheduled(get).items():
        key = f"{KEY}.{step}"
        if not isinstance(step, int) or isinstance(step, bool) or step < 2:
            yield Refusal(
                key,
                value,
                "needs a step from which it holds, a whole number >= 2; the first step's is the configuration's",
            )
        elif isinstance(value, str):
            found = list(_plan(key, value, get))
            yield from found
            named |= set() if found else sizes_of(value).keys()
        elif not isinstance(value, Mapping) or not value or not value.keys() <= FSDP_SIZE.keys():
            yield Refusal(key, value, f"needs blocks for {', '.join(FSDP_SIZE)}, or a plan file")
        else:
            named |= value.keys()
            for model, block in value.items():
                yield from _block(f"{key}.{model}", block, get)
    if "critic" in named and not has_critic(get):
        yield Refusal(KEY, "critic", "this run has no critic")
        named.discard("critic")
    fsdp2 = ("fsdp2", f"{KEY} needs fsdp2: shards of other engines are not known here")
    needs = {_STRATEGY[model]: fsdp2 for model in sorted(named)}
    yield from required(get, {"trainer.v1.trainer_mode": ("fuse", f"{KEY} needs fuse"), **needs})
    for model in sorted(named):
        yield from _family(get, _PATH[model], KEY, Model.from_hf)
    off = {key: value for model in sorted(named) for key, value in _OFF_OF[model].items()}
    yield from off_beside(get, KEY, off)


def _family(get: Get, key: str, feature: str, known: Callable[[Mapping[str, Any], str], object]) -> Iterator[Refusal]:
    """Refuse a model that is not `known`, where its folder is on this machine: elsewhere the run's workers refuse the
    model."""
    path = get(key)
    file = Path(str(path)).expanduser() / "config.json"
    if not path or not os.path.exists(file):
        return
    try:
        known(load_json(file), Path(path).name)
    except FuseError as error:
        yield Refusal(key, path, f"{feature} needs a model that is known: {error}")


def _block(key: str, block: Any, get: Get) -> Iterator[Refusal]:
    ranks = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    if not isinstance(block, Mapping) or set(block) != {"fsdp_size"}:
        yield Refusal(key, block, "needs a block of fsdp_size")
    elif type(size := block["fsdp_size"]) is not int or (size != -1 and (size < 1 or ranks % size)):
        yield Refusal(f"{key}.fsdp_size", size, f"needs -1 (all ranks) or a divisor of the {ranks} ranks")


def _plan(key: str, path: str, get: Get) -> Iterator[Refusal]:
    try:
        wanted = overrides_of(path)
        # `fuse.plan` is applied after all checks.
        applied = overrides_of(get("fuse.plan")) if get("fuse.plan") else {}
    except FuseError as error:
        yield Refusal(key, path, f"needs a plan file: {error}")
        return
    others = [
        name
        for name, value in wanted.items()
        if name not in FSDP_SIZE.values() and applied.get(name, get(name)) != value
    ]
    if others:
        text = (
            f"while a run goes on only {', '.join(sorted(FSDP_SIZE.values()))} can change; this plan also sets "
            f"{', '.join(others[:5])}"
        )
        yield Refusal(key, path, text + (f" and {len(others) - 5} more" if len(others) > 5 else ""))
    for model, name in FSDP_SIZE.items():
        if name in wanted:
            yield from _block(f"{key}.{model}", {"fsdp_size": wanted[name]}, get)
