"""Refuse configurations that an update with parts left out does not serve, before anything is started."""

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    FSDP_BLOCKS,
    MODEL,
    RANDOM,
    REFERENCE,
    TOWERS,
    Get,
    has_adapters,
    has_critic,
    has_reference,
    needed_beside,
    of_mode_fuse,
    off_beside,
    on_accelerators,
    replica_devices,
    required,
)
from verl_fuse.spec.files import load_json
from verl_fuse.spec.step import Refusal
from verl_fuse_update.losses import ANY_LOSSES, BALANCED_LOSSES, ROW_LOSSES

SKIP, OWN, STREAM = "fuse.update.skip_zero_gradient", "fuse.update.skip_old_log_prob", "fuse.update.stream"
BALANCE = "fuse.update.balance"
SHARE = "fuse.update.share_prompts"
CRITIC_VALUES, RESPONSES = "fuse.update.skip_values", "fuse.update.response_logits"
CORRECTION = "algorithm.rollout_correction"
Model = Literal["actor", "critic"]
_LOSSES: dict[str, Mapping[str, Any]] = {SKIP: ROW_LOSSES, OWN: ANY_LOSSES}
_LOSS = f"{ACTOR}.policy_loss.loss_mode"
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


def _off_in_model(model: str) -> dict[str, Any]:
    """Return the settings by which two passes over the same samples differ, and settings that were never run, each with
    the value that switches it off."""
    return {
        f"{model}.mtp.enable": False,
        f"{model}.lora.dropout": 0.0,
        **{f"{model}.override_config.{name}": 0.0 for name in _DROPOUTS},
    }


def _off_in_engines(block: str) -> dict[str, dict[str, Any]]:
    """Return the same settings of the engines that train the model of `block`, by engine."""
    transformer = f"{block}.megatron.override_transformer_config"
    fsdp = {f"{block}.{FSDP_BLOCKS[block]}.qat.enable": False}
    return {
        "fsdp": fsdp,
        "fsdp2": fsdp,
        "megatron": {
            f"{block}.megatron.qat.enable": False,
            f"{block}.megatron.dynamic_context_parallel": False,
            f"{block}.megatron.virtual_pipeline_model_parallel_size": 1,
            f"{block}.megatron.use_megatron_fsdp": False,
            f"{block}.megatron.router_replay.mode": "disabled",
            f"{transformer}.attention_dropout": 0.0,
            f"{transformer}.hidden_dropout": 0.0,
            f"{transformer}.moe_input_jitter_eps": 0.0,
            f"{transformer}.fp8": None,
        },
    }


# These settings must be off for either switch of the actor's update, and where rows change ranks and micro-batches:
# what they compute is of a micro-batch's rows together, or was not run.
_OFF: dict[str, Any] = {
    "fuse.pipeline.enabled": False,
    "distillation.enabled": False,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
}
# These settings of Megatron's routers must be off for samples without a gradient, and where rows change ranks.
_OFF_IN_ROUTERS: dict[str, Any] = {
    f"{ACTOR}.megatron.override_transformer_config.{name}": value
    for name, value in (
        ("moe_aux_loss_coeff", 0.0),
        ("moe_z_loss_coeff", 0.0),
        ("moe_router_enable_expert_bias", False),
        ("moe_router_bias_update_rate", 0.0),
    )
}
# These settings must be off for one switch: they add a gradient to every sample, divide by the number of computed
# samples, or change old log-probs.
_OFF_FOR: dict[str, dict[str, Any]] = {
    SKIP: {
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0,
    },
    OWN: {
        "algorithm.use_kl_in_reward": False,
        f"{CORRECTION}.bypass_mode": False,
        f"{CORRECTION}.rollout_is": None,
        f"{CORRECTION}.rollout_rs": None,
    },
}
# These estimators make advantages of old log-probs.
_OF_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")


# These estimators make a sample's advantages of its own group alone.
OF_GROUPS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
_FSDP = f"{ACTOR}.fsdp_config"
# These settings must be off while updates are streamed: each with its value then, and the reason.
_OFF_IN_STREAMS: dict[str, tuple[Any, str]] = {
    "algorithm.filter_groups.enable": (False, "false: which groups are trained is known after generation"),
    f"{ACTOR}.ulysses_sequence_parallel_size": (1, "1: sequences cut over ranks were not run"),
    f"{_FSDP}.ulysses_sequence_parallel_size": (1, "1: sequences cut over ranks were not run"),
    f"{_FSDP}.offload_policy": (False, "false: gradients that wait were not run in host memory"),
    **{
        f"{_FSDP}.{part}_offload": (False, "false: each streamed call would load the model to the device and back")
        for part in ("param", "optimizer")
    },
    f"{MODEL}.lora_rank": (0, "0: adapters were not run"),
    f"{MODEL}.lora.rank": (0, "0: adapters were not run"),
}


# These settings must be off where the critic's update computes its own values: each with its value then, and the
# reason.
_OFF_WITH_VALUES: dict[str, tuple[Any, str]] = {
    "fuse.pipeline.enabled": (False, "false: a fused update computes no values"),
    "fuse.placement.critic": (None, "null: a critic's own devices compute values, and its update is hidden there"),
    "algorithm.use_pf_ppo": (False, "false: rows are drawn anew between values and update"),
    f"{CORRECTION}.rollout_rs": (None, "null: samples are rejected between values and update"),
    f"{CRITIC}.shuffle": (False, "false: values come in the order of the batch"),
    f"{CRITIC}.megatron.context_parallel_size": (1, "1: sequences cut over ranks were not run"),
}

# These settings must be off where logits are of responses alone: each with its value then, and the reason.
_OFF_WITH_RESPONSES: dict[str, tuple[Any, str]] = {
    "distillation.enabled": (False, "false: its losses read logits themselves"),
    f"{MODEL}.use_fused_kernels": (
        False,
        "false: fused kernels make log-probs without logits, and without their memory",
    ),
    f"{MODEL}.use_liger": (False, "false: liger's forward passes were not run"),
    f"{MODEL}.mtp.enable": (False, "false: further heads were not run"),
    f"{_FSDP}.qat.enable": (False, "false: quantized layers were not run"),
}


_FLASH = ("flash_attention_2", "flash_attention_3")
# These settings must be off where prompts are computed once: each with its value then, and the reason.
_OFF_WITH_SHARED: dict[str, tuple[Any, str]] = _OFF_WITH_RESPONSES | {
    "fuse.pipeline.enabled": (False, "false: a fused update is of Megatron's models"),
    "fuse.update.stream": (False, "false: streamed calls were not run"),
    f"{CORRECTION}.rollout_is_batch_normalize": (False, "false: weights are of a micro-batch's samples together"),
    f"{MODEL}.use_fused_kernels": (False, "false: fused kernels drop the layout of the rows"),
    f"{MODEL}.lora.dropout": (0.0, "0.0: samples would share what is dropped of their prompt"),
    **{
        f"{MODEL}.override_config.{name}": (0.0, "0.0: samples would share what is dropped of their prompt")
        for name in _DROPOUTS
    },
}


def _off_in_role(block: str) -> dict[str, tuple[Any, str]]:
    """Return the settings of a model's own engine that must be off then."""
    cut = (1, "1: sequences cut over ranks were not run")
    return {
        f"{block}.ulysses_sequence_parallel_size": cut,
        f"{block}.fsdp_config.ulysses_sequence_parallel_size": cut,
        f"{block}.fsdp_config.pad_to_length": (False, "false: packed rows have no padding"),
        f"{block}.fsdp_config.qat.enable": (False, "false: quantized layers were not run"),
    }


# Names of models that read images or sound, such as Qwen2.5-VL-7B and InternVL3.
_SEES = re.compile(r"(?:^|[-_./\d])(?:vl|omni|vision|audio|llava|internvl)(?:[-_./\d]|$)", re.IGNORECASE)

# The first torch with FSDPModule.reset_iter_state, without which gradients that wait cannot be dropped.
LEAST_TORCH = (2, 13)


def torch_without_streams() -> str | None:
    """Return the version of the installed torch, if it cannot drop gradients that wait; None where there is no
    torch."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return None
    return found if tuple(map(int, found.split(".")[:2])) < LEAST_TORCH else None


def switched_on(get: Get) -> list[str]:
    """Return the switches that are on."""
    return [switch for switch in (SKIP, OWN) if get(switch)]


def refusals(get: Get) -> Iterator[Refusal]:
    """Yield the settings that keep this configuration from leaving out of an update the work that its switches name."""
    megatron = get(f"{ACTOR}.strategy") == "megatron"
    for switch in (SKIP, OWN, CRITIC_VALUES, RESPONSES, SHARE, BALANCE):
        if get(switch):
            yield from of_mode_fuse(get, f"{switch}=true")
    for switch in switched_on(get):
        on = f"{switch}=true"
        yield from _engine_alike(get, ACTOR, on)
        yield from off_beside(get, on, _OFF | _OFF_FOR[switch])
        if megatron and switch == SKIP:
            yield from off_beside(get, on, _OFF_IN_ROUTERS | {f"{ACTOR}.megatron.context_parallel_size": 1})
        yield from _known_loss(get, on, _LOSSES[switch])
        yield from _passes_alike(get, MODEL, on)
        yield from _adapter_alike(get, on)
    if get(SKIP):
        # A tower that no sample reaches has no gradients in verl, and zeros here.
        yield from _text_alone(get(f"{MODEL}.path"), f"{SKIP}=true")
    if switch := next((switch for switch in (SKIP, STREAM, BALANCE, SHARE) if get(switch)), None):
        yield from _denominators(get, switch)
    if get(OWN):
        yield from _own_log_probs(get)
    if get(STREAM):
        yield from _streamed(get)
    if get(CRITIC_VALUES):
        yield from _own_values(get)
    if get(RESPONSES):
        yield from _response_logits(get)
    if get(SHARE):
        yield from _shared_prompts(get)
    if get(BALANCE):
        yield from _balanced(get)


def placed_models(get: Get) -> list[Model]:
    """Return the models whose updates no other feature places: an update that leaves samples out is placed by them."""
    return [*([] if switched_on(get) else ["actor"]), *(["critic"] if has_critic(get) else [])]  # type: ignore[list-item]


def critic_apart(get: Get) -> str | None:
    """Return the reason why a critic computes the prompt of each sample."""
    if get("fuse.placement.critic"):
        return "fuse.placement.critic: it is asked for nothing while its update runs"
    for key in ("use_liger", "mtp.enable", "lora.dropout"):
        if get(f"{CRITIC}.model.{key}"):
            return f"{CRITIC}.model.{key}={get(f'{CRITIC}.model.{key}')} was not run"
    if get(f"{CRITIC}.fsdp.qat.enable"):
        return f"{CRITIC}.fsdp.qat.enable=true was not run"
    if _divides_by_longest(get, CRITIC):
        return f"{CRITIC}.loss_scale_factor=null: a micro-batch is divided by its longest response"
    return None


def critic_shares(get: Get) -> bool:
    """Tell whether prompts are computed once for the critic, too."""
    return bool(get(SHARE)) and has_critic(get) and not critic_apart(get)


def _engine_alike(get: Get, block: str, on: str) -> Iterator[Refusal]:
    """Refuse an engine of the model of `block` that is not known, and settings of both by which passes over the same
    samples differ."""
    off, engine = _off_in_engines(block), get(f"{block}.strategy")
    if engine not in off:
        yield Refusal(f"{block}.strategy", engine, f"{on} needs {', '.join(off)}")
    model = MODEL if block == ACTOR else f"{block}.model"
    yield from off_beside(get, on, _off_in_model(model) | off.get(engine, {}))


def _known_loss(get: Get, on: str, losses: Mapping[str, Any]) -> Iterator[Refusal]:
    if (get(_LOSS) or "vanilla") not in losses:
        yield Refusal(_LOSS, get(_LOSS), f"{on} needs a loss that was read for it: {', '.join(losses)}")


def _balanced(get: Get) -> Iterator[Refusal]:
    on = f"{BALANCE}=true"
    for block in (ACTOR, *([CRITIC] if has_critic(get) else [])):
        yield from _engine_alike(get, block, on)
        if get(f"{block}.shuffle"):
            key, why = f"{block}.shuffle", f"{on} needs false: each rank draws mini-batches of its own"
            yield Refusal(key, True, why, {key: False})
    megatron = get(f"{ACTOR}.strategy") == "megatron"
    yield from off_beside(get, on, _OFF | (_OFF_IN_ROUTERS if megatron else {}))
    if has_critic(get):
        yield from _denominators(get, BALANCE, CRITIC)
    yield from _known_loss(get, on, BALANCED_LOSSES)


def _response_logits(get: Get) -> Iterator[Refusal]:
    on = f"{RESPONSES}=true"
    yield from _models_of_transformers(get, on)
    yield from needed_beside(get, on, _OFF_WITH_RESPONSES)
    yield from _text_alone(get(f"{MODEL}.path"), on)


def _models_of_transformers(get: Get, on: str) -> Iterator[Refusal]:
    engine, device = get(f"{ACTOR}.strategy"), get("trainer.device")
    if engine not in ("fsdp", "fsdp2"):
        yield Refusal(f"{ACTOR}.strategy", engine, f"{on} needs fsdp or fsdp2, whose models are those of transformers")
    if device not in ("cuda", "cpu", None):
        yield Refusal("trainer.device", device, f"{on} needs cuda or cpu: others were not run")


def _shared_prompts(get: Get) -> Iterator[Refusal]:
    on = f"{SHARE}=true"
    yield from _models_of_transformers(get, on)
    off = _OFF_WITH_SHARED | _off_in_role(ACTOR)
    if has_reference(get) and not has_adapters(get):
        off |= _off_in_role(REFERENCE)
    yield from needed_beside(get, on, off)
    kernel = f"{MODEL}.override_config.attn_implementation"
    if on_accelerators(get) and (get(kernel) or _FLASH[0]) not in _FLASH:
        yield Refusal(kernel, get(kernel), f"{on} needs {' or '.join(_FLASH)} on accelerators", {kernel: _FLASH[0]})
    yield from _known_loss(get, on, BALANCED_LOSSES)
    yield from _text_alone(get(f"{MODEL}.path"), on)


def _text_alone(path: Any, on: str) -> Iterator[Refusal]:
    """Refuse a model that reads images or sound: by its config.json, or by its name where its folder is not on this
    machine; the run's workers look at the model itself."""
    try:
        found = _own_config(path)
    except FuseError as error:
        yield Refusal(f"{MODEL}.path", path, f"{on} needs a config.json that can be read: {error}")
        return
    if found is None:
        if _SEES.search(Path(str(path)).name):
            yield Refusal(f"{MODEL}.path", path, f"{on} needs a model of text alone, and this name is one of images")
    elif towers := [name for name in TOWERS if name in found]:
        words = f"{on} needs a model of text alone: its config.json has {', '.join(towers)}"
        yield Refusal(f"{MODEL}.path", path, words)


def _passes_alike(get: Get, block: str, on: str) -> Iterator[Refusal]:
    """Refuse a model whose own config.json has dropout or noise, by which two passes over the same samples differ,
    unless the run's configuration says otherwise."""
    path, own = get(f"{block}.path"), get(f"{block}.override_config") or {}
    own = own.get("model_config", own)
    try:
        found = {name: value for name, value in (_own_config(path) or {}).items() if name in RANDOM}
    except FuseError:
        # verl ends at such a file.
        return
    for name, value in found.items():
        if name not in own and isinstance(value, int | float) and value > 0:
            words = f"{on} needs a model that drops nothing: its config.json has {name}={value}"
            yield Refusal(f"{block}.path", path, f"{words}; {block}.override_config.{name}=0.0 switches it off")


def _adapter_alike(get: Get, on: str) -> Iterator[Refusal]:
    """Refuse an adapter that is loaded with the dropout of its own adapter_config.json."""
    key = f"{MODEL}.lora_adapter_path"
    file = Path(os.path.expanduser(str(get(key) or ""))) / "adapter_config.json"
    if not get(key) or not os.path.isfile(file):
        return
    try:
        dropout = load_json(file).get("lora_dropout")
    except FuseError:
        # verl ends at such a file.
        return
    if isinstance(dropout, int | float) and dropout > 0:
        words = f"{on} needs an adapter that drops nothing: its adapter_config.json has lora_dropout={dropout}"
        yield Refusal(key, get(key), f"{words}; 0.0 there switches it off")


def _own_config(path: Any) -> dict[str, Any] | None:
    """Return a model's config.json, from its folder or from the cache of Hugging Face's hub on this machine; None where
    it is in neither; a FuseError where it cannot be read."""
    if not path:
        return None
    # A user who is not of this machine stays in the path.
    file = Path(os.path.expanduser(str(path))) / "config.json"
    if not os.path.exists(file):
        home = Path(os.environ.get("HF_HOME") or Path(os.path.expanduser("~")) / ".cache" / "huggingface")
        cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
        found = [*(cache / f"models--{str(path).replace('/', '--')}" / "snapshots").glob("*/config.json")]
        if not found:
            return None
        file = max(found, key=os.path.getmtime)
    return load_json(file)


def _own_values(get: Get) -> Iterator[Refusal]:
    on = f"{CRITIC_VALUES}=true"
    yield from _passes_alike(get, f"{CRITIC}.model", on)
    estimator = "algorithm.adv_estimator"
    if get(estimator) != "gae":
        yield Refusal(estimator, get(estimator), f"{on} needs gae: returns are made of the critic's values")
    if get(f"{CRITIC}.enable") is False:
        yield Refusal(f"{CRITIC}.enable", False, f"{on} needs true or null: there is no critic")
    yield from _engine_alike(get, CRITIC, on)
    yield from needed_beside(get, on, _OFF_WITH_VALUES)


def is_row_loss(get: Get) -> bool:
    """Tell whether a sample whose advantages are all 0 adds exactly 0 to the policy loss."""
    return (get(_LOSS) or "vanilla") in ROW_LOSSES


def is_token_mean(get: Get) -> bool:
    """Tell whether the loss is divided by the tokens of the batch, whose number is known at its end."""
    return (get(f"{ACTOR}.loss_agg_mode") or "token-mean") == "token-mean"


def _streamed(get: Get) -> Iterator[Refusal]:
    on, prompts = f"{STREAM}=true", get("data.train_batch_size")
    if found := torch_without_streams():
        least = ".".join(map(str, LEAST_TORCH))
        yield Refusal(STREAM, True, f"false with torch {found}: {on} needs {least}, whose FSDP2 can drop gradients")
    yield from required(
        get,
        {
            OWN: (True, f"{on} needs true: old log-probs of a streamed group are the update's own"),
            f"{ACTOR}.strategy": ("fsdp2", f"{on} needs fsdp2: gradients wait in its shards"),
            f"{ACTOR}.ppo_mini_batch_size": (
                prompts,
                f"{on} needs one mini-batch a step: data.train_batch_size, {prompts}",
            ),
        },
    )
    if (epochs := get(key := f"{ACTOR}.ppo_epochs")) not in (1, None):
        yield Refusal(key, epochs, f"{on} needs 1: gradients of one pass wait", {key: 1})
    yield from needed_beside(get, on, _OFF_IN_STREAMS)
    estimator = "algorithm.adv_estimator"
    if get(estimator) not in OF_GROUPS:
        yield Refusal(estimator, get(estimator), f"{on} needs advantages of a group alone: {', '.join(OF_GROUPS)}")
    if not is_row_loss(get):
        yield Refusal(_LOSS, get(_LOSS), f"{on} needs a loss of each token alone: {', '.join(ROW_LOSSES)}")
    if get(_LOSS) == "sapo" and is_token_mean(get):
        key = f"{ACTOR}.loss_agg_mode"
        yield Refusal(key, get(key), f"{on} with loss_mode=sapo needs seq-mean-token-mean, which is what it computes")
    for key in (f"{_FSDP}.dtype", f"{_FSDP}.mixed_precision.param_dtype"):
        if get(key) in ("fp16", "float16"):
            yield Refusal(key, get(key), f"{on} needs bfloat16 or float32: losses are scaled anew while gradients wait")
    if get(f"{_FSDP}.fsdp_size") != (devices := replica_devices(get)):
        allowed = f"{on} needs shards on the devices of one rollout replica: {devices}"
        yield Refusal(f"{_FSDP}.fsdp_size", get(f"{_FSDP}.fsdp_size"), allowed)
    yield from _released(get, on)


def _released(get: Get, on: str) -> Iterator[Refusal]:
    slices = get("fuse.interstage.enabled") and get("fuse.interstage.layout") == "slices"
    if get("fuse.interstage.enabled") and not slices:
        key = "fuse.interstage.layout"
        yield Refusal(
            key, get(key), f"{on} needs slices: inference on all training workers would wait for streamed updates"
        )
    if get(f"{ACTOR}.use_kl_loss") and not slices:
        allowed = (
            f"{on} needs false, or fuse.interstage.enabled=true with layout=slices: a group is trained on after its "
            "reference log-probs"
        )
        yield Refusal(f"{ACTOR}.use_kl_loss", True, allowed)
    if not (get("fuse.elastic.enabled") and get("fuse.elastic.release")) and not (
        slices and get("fuse.interstage.migration_threshold")
    ):
        allowed = (
            f"{on} needs fuse.elastic.{{enabled,release}}=true, or a fuse.interstage.migration_threshold with slices: "
            "no device is free otherwise"
        )
        yield Refusal("fuse.elastic.release", get("fuse.elastic.release"), allowed)
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        key = "reward.reward_model.enable_resource_pool"
        yield Refusal(key, get(key), f"{on} needs true: a colocated reward model scores after generation")


def _divides_by_longest(get: Get, block: str) -> bool:
    return get(f"{block}.loss_agg_mode") == "seq-mean-token-sum-norm" and get(f"{block}.loss_scale_factor") is None


def _denominators(get: Get, switch: str, block: str = ACTOR) -> Iterator[Refusal]:
    if _divides_by_longest(get, block):
        allowed = (
            f"{switch}=true needs a number with loss_agg_mode=seq-mean-token-sum-norm: without "
            "it a micro-batch is divided by its longest response"
        )
        yield Refusal(f"{block}.loss_scale_factor", None, allowed)


def _own_log_probs(get: Get) -> Iterator[Refusal]:
    key = f"{ACTOR}.shuffle"
    if get(key) and get(f"{ACTOR}.ppo_mini_batch_size") != get("data.train_batch_size"):
        allowed = f"{OWN}=true needs false with several mini-batches: each rank draws the rows of its first one"
        yield Refusal(key, True, allowed, {key: False})
    estimator = "algorithm.adv_estimator"
    if get(estimator) in _OF_LOG_PROBS:
        yield Refusal(estimator, get(estimator), f"not with {OWN}=true: its advantages are made of old log-probs")
