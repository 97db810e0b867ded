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
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, ConfigKey, Contract, Function
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
    Attribute("verl.workers.engine_workers:TrainingWorker.loss_fn"),
    Function(
        "verl.utils.tensordict_utils:make_iterator",
        "(tensordict, mini_batch_size, epochs, seed=None, dataloader_kwargs=None)",
        "66fce2b30614f39c",
    ),
    # These keys are required, or refused (refusals.py).
    ConfigKey(PPO_YAML, "algorithm.use_kl_in_reward", bool),
    ConfigKey(PPO_YAML, "algorithm.adv_estimator", str),
    ConfigKey(CORRECTION_YAML, "rollout_rs", None),
)
# How verl counts work and deals it out.
_WORK: tuple[Contract, ...] = (
    Function(
        "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions",
        "(seqlen_list, k_partitions, equal_size)",
        "d1884e325704f03e",
    ),
    Function("verl.utils.seqlen_balancing:calculate_workload", "(seqlen_list)", "62b076431d90daf9"),
)
CONTRACTS: tuple[Contract, ...] = (
    Function(
        "verl.workers.engine_workers:TrainingWorker._postprocess_output",
        "(self, output, *, global_token_num, delta_time, forward_only, images_seqlens)",
        "418bf949581d4cd1",
    ),
    Function("verl.workers.engine_workers:ActorRolloutRefWorker.init_model", "(self)", "08285ce005c99bc5"),
    Function("verl.workers.engine.base:BaseEngine.optimizer_step", "(self)", "aa7ecf4cb2f986b5"),
    Function("verl.workers.engine.utils:postprocess_batch_func", "(output_lst, indices, data)", "e6effcf999af3b51"),
    Function(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        "c79ef041c2bf7a37",
    ),
    Function("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step", "(self)", "1ed9f1fddab5ac14"),
    Function(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        "cf6fe0aa07a5c5f2",
    ),
    Function(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_data_parallel_group", "(self)", "4717be2dcd1e53c0"
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.optimizer_step", "(self)", "b70ef03cf89cdbe8"
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.get_data_parallel_group",
        "(self)",
        "aa0d710bd74da7b9",
    ),
    Function("verl.workers.utils.losses:ppo_loss", "(config, model_output, data, dp_group=None)", "660afc801005638d"),
    Function("verl.workers.utils.padding:no_padding_2_padding", "(tensor, data)", "cdacadb3ad5acda6"),
    Function("verl.utils.tensordict_utils:index_select_tensor_dict", "(batch, indices)", "eb6e05d4bf275a38"),
    Function("verl.utils.tensordict_utils:assign_non_tensor", "(tensor_dict, **kwargs)", "55bc5e28e0751e16"),
    *_WORK,
    Function(
        "verl.utils.seqlen_balancing:rearrange_micro_batches",
        "(batch, max_token_len, dp_group=None, num_batches_divided_by=None, same_micro_num_in_dp=True, "
        "min_num_micro_batch=None, use_dynamic_bsz_balance=True, force_group_size=1)",
        "58917f7f19815c14",
    ),
    Function("verl.utils.py_functional:append_to_dict", "(data, new_data, prefix='')", "255fb4f76532c5d7"),
    Function("verl.utils.metric.utils:Metric.aggregate", "(self)", "b2766b233c968c83"),
    Function("verl.utils.metric.utils:Metric.aggregate_dp", "class (cls, metric_lists)", "8e12006e5f10e2a0"),
    Function("verl.utils.metric.utils:Metric.__init__", "(self, aggregation, value=None)", "97f324f86bb5d197"),
    Function(
        "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch",
        "(batch, rollout_corr_config)",
        "12d1ba1183d209cc",
    ),
    Class("verl.utils.metric.utils:AggregationType"),
    Class("verl.utils.metric.utils:Metric"),
    Attribute("verl.utils.metric.utils:AggregationType.MEAN"),
    # What a forward pass has gathered is released so (host/weights/gathered.py).
    Function(f"{_FULLY_SHARD}._fully_shard:FSDPModule.reshard", "(self)", ("6cd4d459179e61e6", "dbdb60fa3e062345")),
    Attribute(f"{_HANDLE}.uses_sharded_strategy"),
    Function(f"{_HANDLE}.reshard", "(self, free_unsharded_flat_param)", "601d081299031eea"),
    Function(f"{_HANDLE}.post_reshard", "(self)", "fd8aa4455b235622"),
    Function("torch.distributed.fsdp._runtime_utils:_lazy_init", "(state, root_module)", "3c08816b7ca4c4e5"),
    Function("torch.distributed.fsdp._traversal_utils:_get_fsdp_handles", "(module)", "532b323bc8f216a2"),
    # These keys are required, or refused (refusals.py).
    ConfigGroup(PPO_YAML, "distillation@distillation: distillation"),
    ConfigKey("verl/trainer/config/distillation/distillation.yaml", "enabled", False),
    ConfigKey(CORRECTION_YAML, "rollout_is", None),
    ConfigKey(CORRECTION_YAML, "rollout_is_batch_normalize", False),
    ConfigKey(ACTOR_YAML, "use_kl_loss", False),
    ConfigKey(ACTOR_YAML, "entropy_coeff", object),
    ConfigKey(ACTOR_YAML, "policy_loss.loss_mode", "vanilla"),
    ConfigKey(ACTOR_YAML, "ppo_mini_batch_size", int),
    ConfigKey(ACTOR_YAML, "ppo_epochs", int),
    ConfigKey(ACTOR_YAML, "shuffle", bool),
    ConfigKey(ACTOR_YAML, "calculate_entropy", bool),
    ConfigKey(MODEL_YAML, "mtp.enable", object),
    ConfigKey(MODEL_YAML, "lora.dropout", 0.0),
    ConfigKey(MODEL_YAML, "override_config", object),
    ConfigKey(FSDP_YAML, "qat.enable", object),
    ConfigKey(MEGATRON_YAML, "qat.enable", object),
    ConfigKey(MEGATRON_YAML, "dynamic_context_parallel", object),
    ConfigKey(MEGATRON_YAML, "context_parallel_size", object),
    ConfigKey(MEGATRON_YAML, "virtual_pipeline_model_parallel_size", type(None)),
    ConfigKey(MEGATRON_YAML, "use_megatron_fsdp", object),
    ConfigKey(MEGATRON_YAML, "router_replay.mode", str),
    ConfigKey(MEGATRON_YAML, "override_transformer_config", object),
)


# A critic's update that computes its own values rests on these contracts: the work of verl between its pass for values
# and the update, and how returns are made.
VALUES_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    Attribute(f"{SYNC_TRAINER}.kl_ctrl_in_reward"),
    Attribute(f"{CORE_ALGORITHMS}:FixedKLController.value"),
    Attribute(f"{CORE_ALGORITHMS}:AdaptiveKLController.value"),
    Function(
        f"{CORE_ALGORITHMS}:compute_gae_advantage_return",
        "(token_level_rewards, values, response_mask, gamma, lam)",
        "72a389b888c21be0",
        exact=True,
    ),
    Function(f"{CORE_ALGORITHMS}:kl_penalty", "(logprob, ref_logprob, kl_penalty)", "2890282c9d695a77"),
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
    Function("verl.workers.utils.losses:value_loss", "(config, model_output, data, dp_group=None)", "424fe5b8b2b2879f"),
    Function("verl.workers.utils.padding:response_to_nested", "(tensor, response_mask)", "a5ede432ce83f25d"),
    # These keys are required, or refused (refusals.py).
    ConfigKey(PPO_YAML, "algorithm.gamma", float),
    ConfigKey(PPO_YAML, "algorithm.lam", float),
    ConfigKey(PPO_YAML, "algorithm.kl_penalty", str),
    ConfigKey(PPO_YAML, "algorithm.use_pf_ppo", bool),
    ConfigKey(CRITIC_YAML, "strategy", object),
    ConfigKey(CRITIC_YAML, "ppo_mini_batch_size", object),
    ConfigKey(CRITIC_YAML, "ppo_epochs", object),
    ConfigKey(CRITIC_YAML, "shuffle", object),
)
# Rows that change ranks within their mini-batch rest on these contracts: how verl counts work, and how a rank cuts its
# rows.
BALANCE_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    ConfigKey(ACTOR_YAML, "ppo_mini_batch_size", int),
    ConfigKey(ACTOR_YAML, "ppo_micro_batch_size_per_gpu", object),
    ConfigKey(ACTOR_YAML, "use_dynamic_bsz", object),
    ConfigKey(ACTOR_YAML, "shuffle", bool),
    ConfigKey(MODEL_YAML, "use_remove_padding", object),
    ConfigKey(CRITIC_YAML, "ppo_mini_batch_size", object),
    ConfigKey(CRITIC_YAML, "shuffle", object),
)
_LM_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
# Logits of responses alone rest on these contracts: how verl's engine calls a model and reads its logits, and what cuts
# the log-probs of responses out of those of whole rows.
RESPONSES_CONTRACTS: tuple[Contract, ...] = (
    Function(f"{_LM_ENGINE}.prepare_model_inputs", "(self, micro_batch)", "260a049b2a21c943", closed=True),
    Function(
        f"{_LM_ENGINE}.prepare_model_outputs",
        "(self, output, output_args, micro_batch, logits_processor_func)",
        "146c727a8d7d2336",
        closed=True,
    ),
    Function(f"{_LM_ENGINE}.forward_step", "(self, micro_batch, loss_function, forward_only)", "cf6fe0aa07a5c5f2"),
    Function(f"{FSDP_ENGINE}._gather_and_unpad_packed", "(self, tensor, pad_size)", "ff5209e09bc3f195", closed=True),
    Attribute(f"{FSDP_ENGINE}.use_ulysses_sp"),
    Attribute(f"{FSDP_ENGINE}.ulysses_parallel_group"),
    Function("verl.workers.utils.losses:ppo_loss", "(config, model_output, data, dp_group=None)", "660afc801005638d"),
    Function("verl.workers.utils.padding:no_padding_2_padding", "(tensor, data)", "cdacadb3ad5acda6"),
    Function("verl.workers.engine_workers:ActorRolloutRefWorker.init_model", "(self)", "08285ce005c99bc5"),
    # These keys are required, or refused (refusals.py).
    ConfigGroup(PPO_YAML, "distillation@distillation: distillation"),
    ConfigKey("verl/trainer/config/distillation/distillation.yaml", "enabled", False),
    ConfigKey(MODEL_YAML, "path", str),
    ConfigKey(MODEL_YAML, "use_fused_kernels", False),
    ConfigKey(MODEL_YAML, "use_liger", False),
    ConfigKey(MODEL_YAML, "mtp.enable", object),
    ConfigKey(FSDP_YAML, "qat.enable", object),
)
# Prompts that are computed once rest on these contracts: how verl's engine splits, prepares and reads rows, and what
# puts outputs back in their order.
SHARED_CONTRACTS: tuple[Contract, ...] = (
    *BALANCE_CONTRACTS,
    *RESPONSES_CONTRACTS,
    Function(
        f"{FSDP_ENGINE}.forward_backward_batch", "(self, data, loss_function, forward_only=False)", "c79ef041c2bf7a37"
    ),
    Function("verl.workers.engine.utils:postprocess_batch_func", "(output_lst, indices, data)", "e6effcf999af3b51"),
    Function("verl.utils.tensordict_utils:index_select_tensor_dict", "(batch, indices)", "eb6e05d4bf275a38"),
    Function("verl.utils.tensordict_utils:assign_non_tensor", "(tensor_dict, **kwargs)", "55bc5e28e0751e16"),
    # These keys are required, or refused (refusals.py).
    ConfigKey(MODEL_YAML, "lora.dropout", 0.0),
    ConfigKey(MODEL_YAML, "override_config", object),
    ConfigKey(ACTOR_YAML, "policy_loss.loss_mode", "vanilla"),
    ConfigKey(CORRECTION_YAML, "rollout_is_batch_normalize", False),
    ConfigKey(FSDP_YAML, "pad_to_length", object),
    ConfigKey(FSDP_YAML, "ulysses_sequence_parallel_size", object),
)
# A streamed update rests on these contracts besides.
STREAM_CONTRACTS: tuple[Contract, ...] = (
    Function(f"{FSDP_ENGINE}._gradient_sync_context", "(self, *, is_last_micro_batch)", "b661462253f5c546"),
    Function(f"{FSDP_ENGINE}.train_mode", "(self, **kwargs)", "0467db431e7b1bc6"),
    Function(f"{FSDP_ENGINE}.lr_scheduler_step", "(self)", "30c940e8d0dc29a6"),
    Function(
        "verl.workers.engine.fsdp.transformer_impl:EngineTrainModeCtx.__exit__",
        "(self, exc_type, exc_value, traceback)",
        "dd8eeb9598f51599",
    ),
    Function("verl.utils.metric:reduce_metrics", "(metrics)", "a2fb84301e7d78a8"),
    Function("verl.utils.py_functional:rename_dict", "(data, prefix='')", "b06265755e84f9dc"),
    Function("verl.workers.engine.fsdp.utils:create_device_mesh", "(world_size, fsdp_size)", "59d012ca6742cd32"),
    Function(f"{_FULLY_SHARD}._fully_shard:FSDPModule.reset_iter_state", "(self)", "0c7e670920e461b3"),
    Function(
        f"{_FULLY_SHARD}._fully_shard:FSDPModule.set_requires_all_reduce",
        "(self, requires_all_reduce, *, recurse=True)",
        "f46a7947de3fa299",
    ),
    Function(
        f"{_FULLY_SHARD}._fully_shard:FSDPModule.set_requires_gradient_sync",
        "(self, requires_gradient_sync, *, recurse=True)",
        "7cd7fb9fe41f0a7e",
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
