"""Refuse configurations in which finished samples may not be streamed, unfinished samples not moved, or slices not
built, before anything is started."""

from collections.abc import Iterator, Sequence

from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    FSDP_BLOCKS,
    MODEL,
    REFERENCE,
    ROLLOUT,
    ULYSSES,
    Get,
    has_adapters,
    has_critic,
    has_reference,
    needed_beside,
    of_mode_fuse,
    on_accelerators,
    replica_devices,
)
from verl_fuse.spec.step import Refusal
from verl_fuse_interstage.connector import TOLD, plain

_STREAMS, _SLICES = "fuse.interstage.enabled=true", "fuse.interstage.layout=slices"
THRESHOLD = "fuse.interstage.migration_threshold"
ENGINES = (ACTOR, REFERENCE, CRITIC)
_QUANTIZED = (
    False,
    "false: verl quantizes the weights of a trained engine only, so a copy would compute other numbers",
)
# These settings must be off for Megatron's copies: each with its value then, and the reason.
_OFF = {
    "context_parallel_size": (1, "1, or null: copies have no context parallelism"),
    "dynamic_context_parallel": (False, "false: copies have no context parallelism"),
    "use_megatron_fsdp": (False, "false: its parameters are parts of a flat buffer"),
    "qat.enable": _QUANTIZED,
    "router_replay.mode": ("disabled", "disabled: routes are recorded by the training workers"),
    "override_transformer_config.pipeline_model_parallel_layout": (None, "null: stages of a copy are even"),
    "override_transformer_config.num_layers_in_first_pipeline_stage": (None, "null: stages of a copy are even"),
    "override_transformer_config.num_layers_in_last_pipeline_stage": (None, "null: stages of a copy are even"),
}

# These settings keep requests from moving: each with the value that lets them move, and the reason.
_MOVED = {
    f"{ROLLOUT}.name": ("vllm", "vllm: it has not been run with another engine"),
    f"{ROLLOUT}.full_determinism": (
        False,
        "false: a seeded request starts its random numbers anew where it goes on",
    ),
    f"{ROLLOUT}.disaggregation.enabled": (False, "false: a prefill server alone cannot finish a request"),
}


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the reasons why this configuration cannot run with `fuse.interstage` as it is."""
    if get("fuse.interstage.enabled"):
        yield from _streaming(get)
        if get(THRESHOLD):
            yield from _migration(get)
        if get("fuse.interstage.layout") == "slices":
            yield from _slices(get)
    yield from _connector(get)


def _streaming(get: Get) -> Iterator[Refusal]:
    yield from of_mode_fuse(get, _STREAMS)
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        yield Refusal(
            "reward.reward_model.enable_resource_pool",
            False,
            f"{_STREAMS} needs the reward model in its own pool (true): a colocated one uses the same workers",
        )
    for key in (f"{engine}.megatron.virtual_pipeline_model_parallel_size" for engine in ENGINES):
        if (get(key) or 1) > 1:
            allowed = f"not yet with {_STREAMS}: micro-groups do not fit virtual pipeline stages; use null"
            yield Refusal(key, get(key), allowed, {key: None})


def _migration(get: Get) -> Iterator[Refusal]:
    threshold = get(THRESHOLD)
    if threshold == "auto" and get("fuse.interstage.layout") != "slices":
        allowed = f"auto needs {_SLICES}: without slices nothing is gained by freeing replicas"
        yield Refusal(THRESHOLD, threshold, allowed)
    if isinstance(threshold, float) and threshold > 1:
        allowed = "a fraction of the step's samples (0.0 to 1.0), a whole number of samples, auto, or null"
        yield Refusal(THRESHOLD, threshold, allowed)
    yield from needed_beside(get, "migration", _MOVED)


def _sequence_parallel(get: Get, engine: str) -> tuple[str, int]:
    """Return (key, size) of Ulysses as the engine reads it: the older key of actor and reference counts where it is
    above 1."""
    old = f"{engine}.{ULYSSES}"
    if engine != CRITIC and (get(old) or 1) > 1:
        return old, get(old)
    key = f"{engine}.{FSDP_BLOCKS[engine]}.{ULYSSES}"
    return key, get(key) or 1


def _copied(get: Get) -> Iterator[str]:
    """Yield the keys of the engines whose inference verl needs in this run: no key of another model is read."""
    # With LoRA the reference is the policy without its adapters.
    in_policy = has_reference(get) and has_adapters(get)
    if in_policy or not get("algorithm.rollout_correction.bypass_mode"):
        yield ACTOR
    if has_reference(get) and not in_policy:
        yield REFERENCE
    if has_critic(get):
        yield CRITIC


def _slices(get: Get) -> Iterator[Refusal]:
    engines = tuple(_copied(get))
    yield from _strategies(get, engines)
    key = f"{ROLLOUT}.free_cache_engine"
    if get(key) is False and on_accelerators(get):
        allowed = f"{_SLICES} needs true: a replica that keeps its memory leaves none for the slice on its devices"
        yield Refusal(key, False, allowed, {key: True})
    if get(f"{ACTOR}.strategy") == "megatron":
        yield from _megatron(get, engines)
    else:
        yield from _adapters(get)
        off = {f"{one}.{FSDP_BLOCKS[one]}.qat.enable": _QUANTIZED for one in engines if one != REFERENCE}
        yield from needed_beside(get, _SLICES, off)
        yield from _devices(get, engines)


def _strategies(get: Get, engines: Sequence[str]) -> Iterator[Refusal]:
    """Refuse engines that slices cannot copy: all copies of a slice are in one process, and Megatron's copies share a
    parallel state."""
    known = ("megatron",) if get(f"{ACTOR}.strategy") == "megatron" else (None, "fsdp", "fsdp2")
    for engine in dict.fromkeys((ACTOR, *engines)):
        strategy = get(f"{engine}.strategy")
        if strategy not in known:
            allowed = (
                f"{_SLICES} needs {' or '.join(filter(None, known))}, as the actor, or all of them megatron: copies of "
                "another engine's weights are not built"
            )
            yield Refusal(f"{engine}.strategy", strategy, allowed)


def _megatron(get: Get, engines: Sequence[str]) -> Iterator[Refusal]:
    """Refuse settings with which a Megatron copy cannot be built, or would compute other numbers. Its pipeline is no
    question: it divides that of its model."""
    first, devices = None, replica_devices(get)
    for engine in engines:
        key = f"{engine}.megatron.tensor_model_parallel_size"
        size = get(key) or 1
        if devices % size:
            allowed = (
                f"{_SLICES} needs a divisor of the {devices} devices of a rollout replica: a copy of another size "
                "rounds sums otherwise than its model"
            )
            yield Refusal(key, size, allowed)
        elif first is not None and size != first[1]:
            allowed = f"{_SLICES} needs the size of {first[0]} ({first[1]}): Megatron's engines of one process share it"
            yield Refusal(key, size, allowed, {key: first[1]})
        first = first or (key, size)
        yield from needed_beside(get, _SLICES, {f"{engine}.megatron.{name}": need for name, need in _OFF.items()})
    for model in (MODEL, *([f"{CRITIC}.model"] if has_critic(get) else [])):
        merged = (0, "0 with megatron: Megatron's adapters are merged into what a rollout gets, and a copy has none")
        heads = (False, "false: a copy is built without heads that predict further tokens")
        off = {f"{model}.lora_rank": merged, f"{model}.lora.rank": merged, f"{model}.mtp.enable": heads}
        yield from needed_beside(get, _SLICES, off)


def _adapters(get: Get) -> Iterator[Refusal]:
    """Refuse LoRA in a form that verl's FSDP engines do not have."""
    for engine, model in ((ACTOR, MODEL), (CRITIC, f"{CRITIC}.model")):
        rank = get(f"{model}.lora_rank") or 0
        if rank > 0 and get(f"{engine}.strategy") not in (None, "fsdp2"):
            allowed = (
                f"{_SLICES} needs fsdp2 with {model}.lora_rank={rank}: FSDP1 has adapters and frozen weights in one "
                "flat parameter"
            )
            key = f"{engine}.strategy"
            yield Refusal(key, get(key), allowed, {key: "fsdp2"} if get(key) == "fsdp" else {})
        for key in () if rank > 0 else (f"{model}.lora.rank", f"{model}.lora_adapter_path"):
            if get(key):
                yield Refusal(
                    key, get(key), f"{_SLICES} needs {model}.lora_rank > 0 with it: FSDP builds no adapter otherwise"
                )


def _devices(get: Get, engines: Sequence[str]) -> Iterator[Refusal]:
    """Refuse sizes that do not fit together: a slice's models share the devices of one replica, and one batch is cut
    the same way for all of them."""
    first, devices = None, replica_devices(get)
    for engine in engines:
        key, size = _sequence_parallel(get, engine)
        if devices % size:
            allowed = f"{_SLICES} needs a divisor of the {devices} devices of a rollout replica"
            yield Refusal(key, size, allowed, {key: min(devices, size)})
        elif first is not None and size != first[1]:
            allowed = f"{_SLICES} needs the size of {first[0]} ({first[1]}): one call on a slice computes all models"
            yield Refusal(key, size, allowed, {key: first[1]})
        first = first or (key, size)
        key = f"{engine}.{FSDP_BLOCKS[engine]}.fsdp_size"
        size = get(key) or -1
        if 0 < size < devices and devices % size:
            allowed = f"{_SLICES} needs -1, or a divisor of the {devices} devices of a rollout replica"
            yield Refusal(key, size, allowed, {key: -1})


def _connector(get: Get) -> Iterator[Refusal]:
    """Refuse a KV connector without its parameters: trainer mode `fuse` tells a connector something with every request,
    whatever else is switched on."""
    key = f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config"
    if not get(key) or get("trainer.v1.trainer_mode") != "fuse":
        return
    params = get(TOLD)
    if params is None or (params and "{weights}" not in str(plain(params))):
        allowed = (
            f"with a KV connector {TOLD} must say what it is told with a request, and {{weights}} must be in it: KV it "
            "keeps outside the engine would otherwise be that of older weights (at least {}, for a connector that "
            "keeps none)"
        )
        yield Refusal(*((key, get(key)) if params is None else (TOLD, params)), allowed)
    freeing = {THRESHOLD: "fuse.interstage.enabled", "fuse.elastic.release": "fuse.elastic.enabled"}
    frees = [key for key, switch in freeing.items() if get(switch) and get(key)]
    if frees and "MooncakeStoreConnector" in str(plain(get(key))):
        allowed = (
            f"not with {frees[0]}: vLLM empties the whole Mooncake store when one replica is freed, while others load "
            "from it"
        )
        yield Refusal(key, get(key), allowed)
