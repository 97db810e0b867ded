"""Declares contracts: the code of verl's worker and engines that a lean update rests on, verl's losses, and the
configuration refused.

Runs with such an update ask for these contracts. Every fingerprint was taken, and its code read, at verl 0.9.1 and
megatron-core 0.16.1.
"""

from collections.abc import Sequence

from verl_fuse.host.upstream.targets import (
    ACTOR_YAML,
    CRITIC_YAML,
    FSDP_ENGINE,
    FSDP_YAML,
    MEGATRON_YAML,
    MODEL_YAML,
    PPO_YAML,
    SYNC_TRAINER,
)
from verl_fuse.spec.composed import ACTOR, Get
from verl_fuse.spec.contract import Attribute, ConfigGroup, Contract, Function, config_keys, names
from verl_fuse_update.losses import ANY_LOSSES, CORE_ALGORITHMS
from verl_fuse_update.refusals import (
    BALANCE,
    CRITIC_VALUES,
    RESPONSES,
    SHARE,
    STREAM,
    switched_on,
    torch_without_streams,
)

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
CORRECTION_YAML = "verl/trainer/config/algorithm/rollout_correction.yaml"

# Every update of this plugin rests on these contracts.
_SHARED: tuple[Contract, ...] = (
    *names("verl.workers.engine_workers:TrainingWorker", "loss_fn"),
    *names("verl.utils.tensordict_utils", "make_iterator"),
    # These keys are required, or refused (refusals.py).
    *config_keys(PPO_YAML, "algorithm.use_kl_in_reward:bool algorithm.adv_estimator:str"),
    *config_keys(CORRECTION_YAML, "rollout_rs"),
)
# How verl counts work and deals it out.
_WORK: tuple[Contract, ...] = (
    *names("verl.utils.seqlen_balancing", "get_seqlen_balanced_partitions calculate_workload"),
)
CONTRACTS: tuple[Contract, ...] = (
    *names("verl.workers.engine_workers:TrainingWorker", "_postprocess_output"),
    *names("verl.workers.engine_workers:ActorRolloutRefWorker", "init_model"),
    *names("verl.workers.engine.base:BaseEngine", "optimizer_step"),
    *names("verl.workers.engine.utils", "postprocess_batch_func"),
    *names(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        "forward_backward_batch optimizer_step get_data_parallel_group",
    ),
    *names("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead", "forward_step"),
    *names("verl.workers.engine.megatron.transformer_impl:MegatronEngine", "optimizer_step get_data_parallel_group"),
    *names("verl.workers.utils.losses", "ppo_loss"),
    *names("verl.workers.utils.padding", "no_padding_2_padding"),
    *names("verl.utils.tensordict_utils", "index_select_tensor_dict assign_non_tensor"),
    *_WORK,
    *names("verl.utils.seqlen_balancing", "rearrange_micro_batches"),
    *names("verl.utils.py_functional", "append_to_dict"),
    *names("verl.utils.metric.utils:Metric", "aggregate aggregate_dp __init__"),
    *names("verl.trainer.ppo.rollout_corr_helper", "compute_rollout_correction_and_add_to_batch"),
    *names("verl.utils.metric.utils", "AggregationType Metric"),
    *names("verl.utils.metric.utils:AggregationType", "MEAN"),
    # What a forward pass has gathered is released so (host/weights/gathered.py).
    *names(f"{_FULLY_SHARD}._fully_shard:FSDPModule", "reshard"),
    Attribute(f"{_HANDLE}.uses_sharded_strategy"),
    *names(_HANDLE, "reshard post_reshard"),
    *names("torch.distributed.fsdp._runtime_utils", "_lazy_init"),
    *names("torch.distributed.fsdp._traversal_utils", "_get_fsdp_handles"),
    # These keys are required, or refused (refusals.py).
    ConfigGroup(PPO_YAML, "distillation@distillation: distillation"),
    *config_keys("verl/trainer/config/distillation/distillation.yaml", "enabled"),
    *config_keys(CORRECTION_YAML, "rollout_is rollout_is_batch_normalize"),
    *config_keys(
        ACTOR_YAML,
        "use_kl_loss entropy_coeff:any policy_loss.loss_mode ppo_mini_batch_size:int ppo_epochs:int shuffle:bool "
        "calculate_entropy:bool",
    ),
    *config_keys(MODEL_YAML, "mtp.enable:any lora.dropout override_config:any"),
    *config_keys(FSDP_YAML, "qat.enable:any"),
    *config_keys(
        MEGATRON_YAML,
        "qat.enable:any dynamic_context_parallel:any context_parallel_size:any "
        "virtual_pipeline_model_parallel_size:none use_megatron_fsdp:any router_replay.mode:str "
        "override_transformer_config:any",
    ),
)


# A critic's update that computes its own values rests on these contracts: the work of verl between its pass for values
# and the update, and how returns are made.
VALUES_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    *names(SYNC_TRAINER, "kl_ctrl_in_reward"),
    *names(f"{CORE_ALGORITHMS}:FixedKLController", "value"),
    *names(f"{CORE_ALGORITHMS}:AdaptiveKLController", "value"),
    Function(
        f"{CORE_ALGORITHMS}:compute_gae_advantage_return",
        "(token_level_rewards, values, response_mask, gamma, lam)",
        "72a389b888c21be0",
        exact=True,
    ),
    *names(CORE_ALGORITHMS, "kl_penalty"),
    Function(
        "verl.trainer.ppo.ray_trainer:apply_kl_penalty",
        "(data, kl_ctrl, kl_penalty='kl')",
        "88cec89ed6fdc3d8",
        exact=True,
    ),
    Function(
        "verl.trainer.ppo.ray_trainer:compute_advantage",
        "(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, config=None)",
        "3b9e7bed2c09ee36",
        exact=True,
    ),
    Function(
        "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
        "(data, batch_keys, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, "
        "config=None)",
        "a3a21adce8e3d466",
        exact=True,
    ),
    *names("verl.workers.utils.losses", "value_loss"),
    *names("verl.workers.utils.padding", "response_to_nested"),
    # These keys are required, or refused (refusals.py).
    *config_keys(
        PPO_YAML, "algorithm.gamma:float algorithm.lam:float algorithm.kl_penalty:str algorithm.use_pf_ppo:bool"
    ),
    *config_keys(CRITIC_YAML, "strategy:any ppo_mini_batch_size:any ppo_epochs:any shuffle:any"),
)
# Rows that change ranks within their mini-batch rest on these contracts: how verl counts work, and how a rank cuts its
# rows.
BALANCE_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    *config_keys(
        ACTOR_YAML, "ppo_mini_batch_size:int ppo_micro_batch_size_per_gpu:any use_dynamic_bsz:any shuffle:bool"
    ),
    *config_keys(MODEL_YAML, "use_remove_padding:any"),
    *config_keys(CRITIC_YAML, "ppo_mini_batch_size:any shuffle:any"),
)
_LM_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
# Logits of responses alone rest on these contracts: how verl's engine calls a model and reads its logits, and what cuts
# the log-probs of responses out of those of whole rows.
RESPONSES_CONTRACTS: tuple[Contract, ...] = (
    *names(_LM_ENGINE, "prepare_model_inputs prepare_model_outputs", closed=True),
    *names(_LM_ENGINE, "forward_step"),
    *names(FSDP_ENGINE, "_gather_and_unpad_packed", closed=True),
    *names(FSDP_ENGINE, "use_ulysses_sp ulysses_parallel_group"),
    *names("verl.workers.utils.losses", "ppo_loss"),
    *names("verl.workers.utils.padding", "no_padding_2_padding"),
    *names("verl.workers.engine_workers:ActorRolloutRefWorker", "init_model"),
    # These keys are required, or refused (refusals.py).
    ConfigGroup(PPO_YAML, "distillation@distillation: distillation"),
    *config_keys("verl/trainer/config/distillation/distillation.yaml", "enabled"),
    *config_keys(MODEL_YAML, "path:str use_fused_kernels use_liger mtp.enable:any"),
    *config_keys(FSDP_YAML, "qat.enable:any"),
)
# Prompts that are computed once rest on these contracts: how verl's engine splits, prepares and reads rows, and what
# puts outputs back in their order.
SHARED_CONTRACTS: tuple[Contract, ...] = (
    *BALANCE_CONTRACTS,
    *RESPONSES_CONTRACTS,
    *names(FSDP_ENGINE, "forward_backward_batch"),
    *names("verl.workers.engine.utils", "postprocess_batch_func"),
    *names("verl.utils.tensordict_utils", "index_select_tensor_dict assign_non_tensor"),
    # These keys are required, or refused (refusals.py).
    *config_keys(MODEL_YAML, "lora.dropout override_config:any"),
    *config_keys(ACTOR_YAML, "policy_loss.loss_mode"),
    *config_keys(CORRECTION_YAML, "rollout_is_batch_normalize"),
    *config_keys(FSDP_YAML, "pad_to_length:any ulysses_sequence_parallel_size:any"),
)
# A streamed update rests on these contracts besides.
STREAM_CONTRACTS: tuple[Contract, ...] = (
    *names(FSDP_ENGINE, "_gradient_sync_context train_mode lr_scheduler_step"),
    *names("verl.workers.engine.fsdp.transformer_impl:EngineTrainModeCtx", "__exit__"),
    *names("verl.utils.metric", "reduce_metrics"),
    *names("verl.utils.py_functional", "rename_dict"),
    *names("verl.workers.engine.fsdp.utils", "create_device_mesh"),
    *names(
        f"{_FULLY_SHARD}._fully_shard:FSDPModule", "reset_iter_state set_requires_all_reduce set_requires_gradient_sync"
    ),
)
# Advantages of a group alone (refusals.py, OF_GROUPS).
ESTIMATORS = {
    "grpo": Function(
        f"{CORE_ALGORITHMS}:compute_grpo_outcome_advantage",
        "(token_level_rewards, response_mask, index, epsilon=..., norm_adv_by_std_in_grpo=True, config=None)",
        "f0b2be3601244360",
        exact=True,
    ),
    "grpo_vectorized": Function(
        f"{CORE_ALGORITHMS}:compute_grpo_vectorized_outcome_advantage",
        "(token_level_rewards, response_mask, index, epsilon=..., norm_adv_by_std_in_grpo=True, config=None)",
        "7afea8fd0f8e0d49",
        exact=True,
    ),
    "rloo": Function(
        f"{CORE_ALGORITHMS}:compute_rloo_outcome_advantage",
        "(token_level_rewards, response_mask, index, epsilon=..., config=None, **kwargs)",
        "20a0af45516ef32c",
        exact=True,
    ),
    "rloo_vectorized": Function(
        f"{CORE_ALGORITHMS}:compute_rloo_vectorized_outcome_advantage",
        "(token_level_rewards, response_mask, index, epsilon=..., config=None, **kwargs)",
        "f504699fdfe1d429",
        exact=True,
    ),
}


def contracts(get: Get | None) -> Sequence[Contract]:
    """Return the contracts of a run (None: of any run that this torch can do), with the loss that it trains by."""
    lean = get is None or bool(switched_on(get))
    values = VALUES_CONTRACTS if get is None or get(CRITIC_VALUES) else ()
    responses = RESPONSES_CONTRACTS if get is None or get(RESPONSES) else ()
    balance = BALANCE_CONTRACTS if get is None or get(BALANCE) else ()
    sharing = SHARED_CONTRACTS if get is None or get(SHARE) else ()
    shared = (*_SHARED, *(CONTRACTS if lean else ())) if lean or values or balance or sharing else ()
    names = ANY_LOSSES if get is None else {get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"} & ANY_LOSSES.keys()
    losses = [_loss(*ANY_LOSSES[name]) for name in sorted(names)] if lean or balance or sharing else ()
    streamed: Sequence[Contract] = ()
    if (get is None and not torch_without_streams()) or (get is not None and lean and get(STREAM)):
        wanted = [one for name, one in ESTIMATORS.items() if get is None or name == get("algorithm.adv_estimator")]
        streamed = (*STREAM_CONTRACTS, *wanted)
    # Some are of several features.
    return tuple(dict.fromkeys((*shared, *values, *responses, *balance, *sharing, *streamed, *losses)))


def _loss(function: str, fingerprint: str) -> Contract:
    signature = (
        "(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=None, rollout_is_weights=None)"
    )
    # Exact: another loss may give samples without an advantage a gradient.
    return Function(f"{CORE_ALGORITHMS}:{function}", signature, fingerprint, exact=True)
