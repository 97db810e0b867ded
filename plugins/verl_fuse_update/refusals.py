"""What an update that leaves something out does not do, refused before anything is started."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_fuse.spec.composed import ACTOR, MODEL, Get, required, required_if_set
from verl_fuse.spec.step import Refusal
from verl_fuse_update.losses import ANY_LOSSES, ROW_LOSSES

SKIP, OWN = "fuse.update.skip_zero_gradient", "fuse.update.skip_old_log_prob"
CORRECTION = "algorithm.rollout_correction"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
HF = f"{MODEL}.override_config"
_LOSSES: dict[str, Mapping[str, Any]] = {SKIP: ROW_LOSSES, OWN: ANY_LOSSES}
# What must be off, and its value then. For either switch: what passes over the same samples differ by, or what was never run.
_OFF: dict[str, Any] = {
    "fuse.pipeline.enabled": False,
    "distillation.enabled": False,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{MODEL}.mtp.enable": False,
    f"{MODEL}.lora.dropout": 0.0,
    f"{HF}.attention_dropout": 0.0,
    f"{HF}.hidden_dropout": 0.0,
    f"{HF}.resid_pdrop": 0.0,
    f"{HF}.embd_pdrop": 0.0,
    f"{HF}.attn_pdrop": 0.0,
}
_OFF_IN: dict[str, dict[str, Any]] = {
    "fsdp2": {f"{ACTOR}.fsdp_config.qat.enable": False},
    "megatron": {
        f"{ACTOR}.megatron.qat.enable": False,
        f"{ACTOR}.megatron.dynamic_context_parallel": False,
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 1,
        f"{ACTOR}.megatron.use_megatron_fsdp": False,
        f"{ACTOR}.megatron.router_replay.mode": "disabled",
        f"{TRANSFORMER}.attention_dropout": 0.0,
        f"{TRANSFORMER}.hidden_dropout": 0.0,
        f"{TRANSFORMER}.moe_input_jitter_eps": 0.0,
        f"{TRANSFORMER}.fp8": None,
    },
}
# Of one switch: what adds a gradient to every sample, or divides by those that are computed.
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
_OFF_FOR_IN: dict[str, dict[str, dict[str, Any]]] = {
    "megatron": {
        SKIP: {
            f"{ACTOR}.megatron.context_parallel_size": 1,
            f"{TRANSFORMER}.moe_aux_loss_coeff": 0.0,
            f"{TRANSFORMER}.moe_z_loss_coeff": 0.0,
            f"{TRANSFORMER}.moe_router_enable_expert_bias": False,
            f"{TRANSFORMER}.moe_router_bias_update_rate": 0.0,
        }
    }
}
# Advantages of these are made of old log-probs.
_OF_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")


def switched_on(get: Get) -> list[str]:
    """The switches that are on."""
    return [switch for switch in (SKIP, OWN) if get(switch)]


def refusals(get: Get) -> Iterator[Refusal]:
    """What keeps this configuration from leaving out of an update what its switches say."""
    engine = get(f"{ACTOR}.strategy")
    for switch in switched_on(get):
        yield from required(get, {"trainer.v1.trainer_mode": ("fuse", f"{switch}=true needs fuse")})
        if engine not in _OFF_IN:
            yield Refusal(f"{ACTOR}.strategy", engine, f"{switch}=true needs {' or '.join(_OFF_IN)}")
        off = _OFF | _OFF_IN.get(engine, {}) | _OFF_FOR[switch] | _OFF_FOR_IN.get(engine, {}).get(switch, {})
        yield from required_if_set(
            get, {key: (value, f"not with {switch}=true: {value}") for key, value in off.items()}
        )
        loss = f"{ACTOR}.policy_loss.loss_mode"
        if (get(loss) or "vanilla") not in _LOSSES[switch]:
            yield Refusal(
                loss, get(loss), f"{switch}=true needs a loss that was read for it: {', '.join(_LOSSES[switch])}"
            )
    if get(SKIP):
        yield from _denominators(get)
    if get(OWN):
        yield from _one_mini_batch(get)


def _denominators(get: Get) -> Iterator[Refusal]:
    if get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm" and get(f"{ACTOR}.loss_scale_factor") is None:
        allowed = f"{SKIP}=true needs a number with loss_agg_mode=seq-mean-token-sum-norm: without it a micro-batch is divided by its longest response"
        yield Refusal(f"{ACTOR}.loss_scale_factor", None, allowed)


def _one_mini_batch(get: Get) -> Iterator[Refusal]:
    key, prompts = f"{ACTOR}.ppo_mini_batch_size", get("data.train_batch_size")
    if get(key) != prompts:
        yield Refusal(key, get(key), f"{OWN}=true needs one mini-batch a step: data.train_batch_size, {prompts}")
    if (epochs := get(f"{ACTOR}.ppo_epochs")) not in (1, None):
        yield Refusal(f"{ACTOR}.ppo_epochs", epochs, f"{OWN}=true needs 1: later epochs compare with the first")
    estimator = "algorithm.adv_estimator"
    if get(estimator) in _OF_LOG_PROBS:
        yield Refusal(estimator, get(estimator), f"not with {OWN}=true: its advantages are made of old log-probs")
