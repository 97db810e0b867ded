"""Refuse configurations that cannot run on the cpu platform, before anything is started.

Invariant (tests/unit/cpu/test_cpu_refusals.py): a check reads the configuration, the environment and small local files,
and never imports torch, ray, vLLM or verl.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from verl_fuse.spec.composed import Get, has_critic, has_reference, required, required_if_set
from verl_fuse.spec.step import Refusal
from verl_fuse_cpu.environment import active
from verl_fuse_cpu.leftovers import SHARED_MEMORY, leftovers
from verl_fuse_cpu.vocabulary import Vocabulary, read_vocabulary

_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_MIB = 1 << 20
_DTYPES = {None: "bf16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run on the cpu platform, if the configuration or the environment
    asks for that platform."""
    if get("trainer.device") == "cpu" or active():
        for check in CHECKS:
            yield from check(get)


def _platform(get: Get) -> Iterator[Refusal]:
    # The entry point is a loaded module here only if verl loaded it; an import from here would import verl.
    failure = getattr(sys.modules.get("verl_fuse_cpu.entry"), "failure", None)
    if not active():
        yield Refusal(
            "VERL_PLATFORM",
            os.environ.get("VERL_PLATFORM"),
            "trainer.device=cpu needs VERL_PLATFORM=cpu in the environment",
        )
    elif failure is not None:
        yield Refusal("VERL_PLATFORM", "cpu", f"the cpu platform could not be registered: {failure}")
    yield from required(get, {"trainer.device": ("cpu", "VERL_PLATFORM=cpu needs trainer.device=cpu")})


def _virtual_devices(get: Get) -> Iterator[Refusal]:
    needed = _product(get("trainer.nnodes"), get("trainer.n_gpus_per_node"))
    if get("actor_rollout_ref.hybrid_engine") is False:
        needed += _product(get(f"{_ROLLOUT}.nnodes"), get(f"{_ROLLOUT}.n_gpus_per_node"))
    if get("ray_kwargs.ray_init.address") is not None:
        return
    given = get("ray_kwargs.ray_init.num_gpus")
    if not isinstance(given, int) or given < needed:
        key = "ray_kwargs.ray_init.num_gpus"
        yield Refusal(key, given, f"Ray must be told of at least {needed} virtual devices: +{key}={needed}")


def _attention(get: Get) -> Iterator[Refusal]:
    for key in (f"{model}.override_config.attn_implementation" for model in _models(get)):
        if (get(key) or "flash_attention_2") not in ("sdpa", "eager"):
            yield Refusal(key, get(key), "flash attention needs a GPU (it is verl's default); sdpa or eager")


def _megatron(get: Get) -> Iterator[Refusal]:
    for role in (role for role in _roles(get) if get(f"{role}.strategy") == "megatron"):
        key = f"{role}.megatron.use_distributed_optimizer"
        if get(key) is False and (get("trainer.save_freq") or 0) > 0 and role != "actor_rollout_ref.ref":
            yield Refusal(key, False, "on a CPU verl saves checkpoints of the distributed optimizer only: true")
        key = f"{role}.megatron.vanilla_mbridge"
        if not get(key):
            yield Refusal(key, get(key), "Megatron-Bridge needs Transformer Engine, which needs a GPU: true")
    if get("actor_rollout_ref.actor.strategy") == "megatron":
        packed = "Megatron's own attention, the only one on a CPU, knows no packed sequences: false"
        yield from required_if_set(get, {f"{model}.use_remove_padding": (False, packed) for model in _models(get)})


def _precision(get: Get) -> Iterator[Refusal]:
    # verl's default is bf16. TransferQueue logs a mismatch between roles, and goes on with wrong numbers.
    engines = {"actor_rollout_ref.actor": "fsdp_config", "actor_rollout_ref.ref": "fsdp_config", "critic": "fsdp"}
    keys = [
        f"{role}.megatron.dtype"
        if get(f"{role}.strategy") == "megatron"
        else f"{role}.{engines[role]}.mixed_precision.param_dtype"
        for role in _roles(get)
    ]
    values = {key: _DTYPES.get(get(key), str(get(key))) for key in keys}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in values.items())
        for key, value in values.items():
            if value != values[keys[0]]:
                yield Refusal(key, value, f"all roles need one precision (unset means bf16), but {listed}")


def _sleep(get: Get) -> Iterator[Refusal]:
    # verl's dataclass default for the first key is true as well.
    keys = (f"{_ROLLOUT}.enable_sleep_mode", f"{_ROLLOUT}.free_cache_engine")
    yield from required(get, dict.fromkeys(keys, (False, "vLLM cannot sleep or free its cache on a CPU: false")))


def _weight_buffers(get: Get) -> Iterator[Refusal]:
    key = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    bucket = get(key)
    devices = _ROLLOUT if get("actor_rollout_ref.hybrid_engine") is False else "trainer"
    senders = _product(get(f"{devices}.n_gpus_per_node"))
    if not isinstance(bucket, int) or not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free + sum(path.stat().st_blocks * 512 for path in leftovers(SHARED_MEMORY))
    if bucket * senders * _MIB > free:
        most = free // (senders * _MIB)
        yield Refusal(
            key,
            bucket,
            f"{senders} ranks take a buffer each from {SHARED_MEMORY}, which has {free // _MIB} MiB free: at most "
            f"{most}",
        )


def _workers(get: Get) -> Iterator[Refusal]:
    key = f"{_VLLM}.distributed_executor_backend"
    for degree in (f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ROLLOUT}.pipeline_model_parallel_size"):
        if (get(degree) or 1) > 1 and get(key) == "uni":
            yield Refusal(key, "uni", f"{degree}={get(degree)} needs mp: one process waits for the others for ever")


def _kv_cache(get: Get) -> Iterator[Refusal]:
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if space is not None and get(f"{_VLLM}.kv_cache_memory_bytes") is not None:
        yield Refusal(
            "VLLM_CPU_KVCACHE_SPACE",
            space,
            f"overrides {_VLLM}.kv_cache_memory_bytes: unset the variable, or drop the key",
        )


def _vocabulary(get: Get) -> Iterator[Refusal]:
    for model in _models(get):
        key = f"{model}.path"
        found: Vocabulary | None = read_vocabulary(get(key), get(f"{model}.tokenizer_path"))
        if found is not None and found.model != found.tokenizer:
            yield Refusal(
                key,
                get(key),
                f"config.json has vocab_size={found.model}, the tokenizer {found.tokenizer} entries: they must be "
                "equal, "
                "or log-probs of rollout and trainer differ by a constant",
            )


CHECKS: tuple[Callable[[Get], Iterator[Refusal]], ...] = (
    _platform,
    _virtual_devices,
    _attention,
    _megatron,
    _precision,
    _sleep,
    _weight_buffers,
    _workers,
    _kv_cache,
    _vocabulary,
)


def _roles(get: Get) -> list[str]:
    """Return the configuration blocks of the roles that train or infer in this run (verl/trainer/ppo/utils.py)."""
    others = {"actor_rollout_ref.ref": has_reference(get), "critic": has_critic(get)}
    return ["actor_rollout_ref.actor", *(role for role, used in others.items() if used)]


def _models(get: Get) -> list[str]:
    """Return the configuration blocks of the models of these roles; the reference has the actor's."""
    return ["actor_rollout_ref.model", *(["critic.model"] if has_critic(get) else [])]


def _product(*values: Any) -> int:
    return math.prod(value if isinstance(value, int) else 1 for value in values)
