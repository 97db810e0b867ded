"""Declares contracts on worker groups of their own on a replica's devices and the models in them
(verl_fuse_interstage/slices, buckets.py, assembly.py), on what limits a stage's batch, and on the metrics that we
compute like verl (stages.py)."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, config, names

CONTRACTS: tuple[Contract, ...] = (
    # A world of its own on part of a pool; a worker that holds models of several kinds, dispatched over a mesh of its
    # own; memory that is given back.
    Class(f"{t.RAY_WORKER_GROUPS}:RayClassWithInitArgs", ("ClassWithInitArgs",)),
    *names(f"{t.ROLLOUT_REPLICA}.world_size verl.utils.memory_utils:aggressive_empty_cache {t.BASE_TRAINER}.processor"),
    *names(f"{t.BASE_TRAINER}.resource_pool_manager .resource_pool_to_cls"),
    *names(f"{t.RAY_WORKER_GROUPS}:RayClassWithInitArgs.__init__ :ResourcePoolManager.get_resource_pool"),
    *names(f"{t.RAY_WORKER_GROUPS}:split_resource_pool :RayWorkerGroup.__init__ ._init_with_subresource_pool"),
    *names("verl.single_controller.base.worker:Worker.__init__ .set_dispatch_collect .get_dispatch_collect"),
    Class("verl.single_controller.base.decorator:Dispatch", ("DynamicEnum",)),
    # Policy and reference as verl builds them, each from its own block; with LoRA the policy without adapters is the
    # reference. The critic, from the settings that verl gives its workers.
    *names("verl.workers.config:TrainingWorkerConfig.engine_config :HFModelConfig.lora_rank :TrainingWorkerConfig"),
    *names(f"verl.single_controller.base.worker_group:ClassWithInitArgs.kwargs {t.WORKER}.__init__ .ref .actor"),
    *names(f"{t.WORKER}.actor_worker_cls .ref_worker_cls {t.TRAINING_WORKER}.engine .engine_config .model_config"),
    Decorator(f"{t.WORKER}.init_model", t.ONE_TO_ALL),
    *names(f"{t.TRAINING_WORKER}.reset", closed=True),
    # Differences of a forward-only engine; the dtype that parameters are rounded to, and the place of its shards; the
    # part of a trained model that stays on its device, and its size; parameters; the fields that a forward pass reads
    # and leaves.
    *names("verl.workers.config:EngineConfig.forward_only :FSDPEngineConfig.model_dtype .mixed_precision"),
    *names("verl.workers.config:HFModelConfig.hf_config .model_type verl.utils.torch_dtypes:PrecisionType.to_dtype"),
    *names(f"{t.FSDP_ENGINE}._build_module ._build_model_optimizer ._build_fsdp_module .engine_config"),
    *names(f"{t.FSDP_ENGINE}.is_optimizer_offload_enabled() ._uses_fsdp2_cpu_offload_policy .device_mesh .optimizer"),
    *names(f"{t.FSDP_ENGINE}.model_config .eval_mode .module transfer_queue:KVBatchMeta.fields"),
    *names("verl.utils.tensordict_utils:assign_non_tensor() :get() verl.workers.utils.padding:response_from_nested"),
    *names("verl.utils.fsdp_utils:fsdp_version() :get_fsdp_full_state_dict"),
    *config(f"{t.FSDP_YAML} forward_only:bool model_dtype:str"),
    # What stages compute like verl, and the size of a micro-batch.
    *names(f"verl.protocol:DataProto .batch {t.CORE_ALGORITHMS}:agg_loss verl.utils.config:omega_conf_to_dataclass()"),
    *names(f"verl.utils.debug.metrics:calculate_debug_metrics {t.TRAINING_WORKER}.__init__"),
    *names("verl.workers.engine.utils:prepare_micro_batches verl.workers.config:EngineConfig.use_dynamic_bsz"),
    *names("verl.workers.config:EngineConfig.infer_micro_batch_size_per_gpu :CriticConfig.engine"),
    *names(f"{t.WORKER}.init_model", closed=True),
    *config(f"{t.PPO_YAML} critic@critic actor@actor_rollout_ref.actor algorithm@algorithm.rollout_correction"),
    *config(f"{t.PPO_YAML} ref@actor_rollout_ref.ref {t.REF_YAML} log_prob_micro_batch_size_per_gpu:any"),
    *config(f"{t.REF_YAML} log_prob_use_dynamic_bsz:any {t.ROLLOUT_YAML} log_prob_micro_batch_size_per_gpu:any"),
    *config(f"{t.ROLLOUT_YAML} calculate_log_probs:bool log_prob_use_dynamic_bsz:any {t.CORRECTION_YAML} bypass_mode"),
    # Tells whether leaving weights for slices takes memory of a device (slices/refresh.py).
    *config(f"{t.DP_ACTOR_YAML} ../engine@fsdp_config {t.DP_CRITIC_YAML} ../engine@fsdp strategy:str"),
    *config(f"{t.FSDP_YAML} param_offload:bool {t.ACTOR_YAML} loss_agg_mode:str loss_scale_factor:any"),
)
