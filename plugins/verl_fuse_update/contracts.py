"""Declares contracts: the code of verl's worker and engines that a lean update rests on, verl's losses, and the
configuration refused. Runs with such an update ask for these contracts."""

from collections.abc import Sequence

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.composed import ACTOR, Get
from verl_fuse.spec.contract import Contract, config, names
from verl_fuse_update import refusals as r
from verl_fuse_update.losses import ANY_LOSSES

# Every update of this plugin. The configuration is required, or refused (refusals.py).
_SHARED: tuple[Contract, ...] = (
    *names(f"{t.TRAINING_WORKER}.loss_fn verl.utils.tensordict_utils:make_iterator"),
    *config(f"{t.PPO_YAML} algorithm.use_kl_in_reward:bool algorithm.adv_estimator:str {t.CORRECTION_YAML} rollout_rs"),
)
# How verl counts work and deals it out.
_WORK = names("verl.utils.seqlen_balancing:get_seqlen_balanced_partitions :calculate_workload")
# How verl's engine calls a model and a loss.
_FORWARD: tuple[Contract, ...] = (
    *names(f"{t.WORKER}.init_model verl.workers.utils.losses:ppo_loss verl.workers.utils.padding:no_padding_2_padding"),
    *names(f"{t.FSDP_ENGINES}:FSDPEngineWithLMHead.forward_step"),
    *config(f"{t.PPO_YAML} distillation@distillation {t.DISTILLATION_YAML} enabled"),
)
# How verl cuts the rows of a batch, and puts them together again.
_ROWS: tuple[Contract, ...] = (
    *names(f"{t.FSDP_ENGINE}.forward_backward_batch verl.workers.engine.utils:postprocess_batch_func"),
    *names("verl.utils.tensordict_utils:index_select_tensor_dict :assign_non_tensor"),
)
CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    *_FORWARD,
    *_ROWS,
    *names(f"{t.TRAINING_WORKER}._postprocess_output verl.utils.py_functional:append_to_dict"),
    *names("verl.utils.seqlen_balancing:rearrange_micro_batches verl.workers.engine.base:BaseEngine.optimizer_step"),
    *names(f"{t.FSDP_ENGINE}.optimizer_step .get_data_parallel_group"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngine.optimizer_step .get_data_parallel_group"),
    *names("verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch"),
    *names("verl.utils.metric.utils:AggregationType.MEAN :AggregationType :Metric .aggregate .aggregate_dp .__init__"),
    # What a forward pass has gathered is released so (host/weights/gathered.py).
    *names(f"torch.distributed.fsdp._runtime_utils:_lazy_init {t.FULLY_SHARD}._fully_shard:FSDPModule.reshard"),
    *names(f"torch.distributed.fsdp._traversal_utils:_get_fsdp_handles {t.FLAT_PARAM}:FlatParamHandle.reshard"),
    *names(f"{t.FLAT_PARAM}:FlatParamHandle.post_reshard .uses_sharded_strategy?"),
    *config(f"{t.FSDP_YAML} qat.enable:any {t.MODEL_YAML} lora.dropout override_config:any mtp.enable:any"),
    *config(f"{t.CORRECTION_YAML} rollout_is rollout_is_batch_normalize {t.ACTOR_YAML} shuffle:bool use_kl_loss"),
    *config(f"{t.ACTOR_YAML} ppo_mini_batch_size:int calculate_entropy:bool policy_loss.loss_mode ppo_epochs:int"),
    *config(f"{t.ACTOR_YAML} entropy_coeff:any {t.MEGATRON_YAML} override_transformer_config:any qat.enable:any"),
    *config(f"{t.MEGATRON_YAML} use_megatron_fsdp:any dynamic_context_parallel:any router_replay.mode:str"),
    *config(f"{t.MEGATRON_YAML} virtual_pipeline_model_parallel_size:none context_parallel_size:any"),
)
# A critic's update that computes its own values: verl's work between its pass for values and the update, and returns.
VALUES_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    *names(f"{t.SYNC_TRAINER}.kl_ctrl_in_reward {t.CORE_ALGORITHMS}:FixedKLController.value"),
    *names(f"{t.CORE_ALGORITHMS}:AdaptiveKLController.value :kl_penalty verl.workers.utils.losses:value_loss"),
    *names("verl.workers.utils.padding:response_to_nested"),
    *names(f"{t.CORE_ALGORITHMS}:compute_gae_advantage_return", exact=True),
    *names("verl.trainer.ppo.ray_trainer:apply_kl_penalty :compute_advantage", exact=True),
    *names("verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories", exact=True),
    *config(f"{t.PPO_YAML} algorithm.gamma:float algorithm.lam:float algorithm.kl_penalty:str"),
    *config(f"{t.PPO_YAML} algorithm.use_pf_ppo:bool {t.CRITIC_YAML} strategy:any ppo_mini_batch_size:any"),
    *config(f"{t.CRITIC_YAML} ppo_epochs:any shuffle:any"),
)
# Rows that change ranks within their mini-batch: how verl counts work, and how a rank cuts its rows.
BALANCE_CONTRACTS: tuple[Contract, ...] = (
    *_WORK,
    *config(f"{t.ACTOR_YAML} ppo_mini_batch_size:int shuffle:bool ppo_micro_batch_size_per_gpu:any"),
    *config(f"{t.ACTOR_YAML} use_dynamic_bsz:any {t.MODEL_YAML} use_remove_padding:any"),
    *config(f"{t.CRITIC_YAML} ppo_mini_batch_size:any shuffle:any"),
)
# Logits of responses alone: how verl's engine calls a model and reads its logits, and what cuts the log-probs of
# responses out of those of whole rows.
RESPONSES_CONTRACTS: tuple[Contract, ...] = (
    *_FORWARD,
    *names(f"{t.FSDP_ENGINES}:FSDPEngineWithLMHead.prepare_model_inputs .prepare_model_outputs", closed=True),
    *names(f"{t.FSDP_ENGINE}._gather_and_unpad_packed", closed=True),
    *names(f"{t.FSDP_ENGINE}.use_ulysses_sp .ulysses_parallel_group"),
    *config(f"{t.MODEL_YAML} path:str use_fused_kernels use_liger mtp.enable:any {t.FSDP_YAML} qat.enable:any"),
)
# Prompts that are computed once: how verl's engine splits, prepares and reads rows, and puts outputs back in order.
SHARED_CONTRACTS: tuple[Contract, ...] = (
    *BALANCE_CONTRACTS,
    *RESPONSES_CONTRACTS,
    *_ROWS,
    *config(f"{t.CORRECTION_YAML} rollout_is_batch_normalize {t.MODEL_YAML} lora.dropout override_config:any"),
    *config(f"{t.ACTOR_YAML} policy_loss.loss_mode {t.FSDP_YAML} pad_to_length:any ulysses_sequence_parallel_size:any"),
)
# A streamed update.
STREAM_CONTRACTS: tuple[Contract, ...] = (
    *names(f"{t.FSDP_ENGINE}._gradient_sync_context .train_mode .lr_scheduler_step verl.utils.metric:reduce_metrics"),
    *names(f"verl.workers.engine.fsdp.utils:create_device_mesh {t.FSDP_ENGINES}:EngineTrainModeCtx.__exit__"),
    *names(f"{t.FULLY_SHARD}._fully_shard:FSDPModule.reset_iter_state .set_requires_all_reduce"),
    *names(f"{t.FULLY_SHARD}._fully_shard:FSDPModule.set_requires_gradient_sync verl.utils.py_functional:rename_dict"),
)


def contracts(get: Get | None) -> Sequence[Contract]:
    """Return the contracts of a run (None: of any run that this torch can do), with the loss that it trains by."""
    lean = get is None or bool(r.switched_on(get))
    values = VALUES_CONTRACTS if get is None or get(r.CRITIC_VALUES) else ()
    responses = RESPONSES_CONTRACTS if get is None or get(r.RESPONSES) else ()
    balance = BALANCE_CONTRACTS if get is None or get(r.BALANCE) else ()
    sharing = SHARED_CONTRACTS if get is None or get(r.SHARE) else ()
    shared = (*_SHARED, *(CONTRACTS if lean else ())) if lean or values or balance or sharing else ()
    modes = ANY_LOSSES if get is None else {get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"} & ANY_LOSSES.keys()
    functions = [ANY_LOSSES[mode] for mode in sorted(modes)] if lean or balance or sharing else []
    streamed: Sequence[Contract] = ()
    if (get is None and not r.torch_without_streams()) or (get is not None and lean and get(r.STREAM)):
        wanted = [name for name in r.OF_GROUPS if get is None or name == get("algorithm.adv_estimator")]
        functions += [f"compute_{name}_outcome_advantage" for name in wanted]
        streamed = STREAM_CONTRACTS
    # Exact: another loss may give samples without an advantage a gradient.
    exact = names(" ".join(f"{t.CORE_ALGORITHMS}:{function}" for function in functions), exact=True)
    # Some are of several features.
    return tuple(dict.fromkeys((*shared, *values, *responses, *balance, *sharing, *streamed, *exact)))
