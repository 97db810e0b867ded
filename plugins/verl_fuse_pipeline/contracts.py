"""Declares contracts: the code that a fused update rests on (verl's Megatron engines and workers, Megatron's parallel
state and steps), and the configuration refused (refusals.py). Runs that train fused check these contracts."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Contract, Decorator, config, names

ENGINE = "EngineRegistry.register(model_type='{}', backend='megatron')"
STATE = "megatron.core.parallel_state"

CONTRACTS: tuple[Contract, ...] = (
    # Engines are found by vendor, one class per kind of model, with all of its parallel state (engine.py, fusion.py).
    *names(f"verl.workers.engine.base:EngineRegistry.register .new {t.MEGATRON_ENGINES}:MegatronEngineWithLMHead"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngineWithValueHead :MegatronEngine._init_device_mesh .get_per_tensor_param"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngine.initialize .tf_config .engine_config .module"),
    Decorator(f"{t.MEGATRON_ENGINES}:MegatronEngineWithLMHead", ENGINE.format("language_model")),
    Decorator(f"{t.MEGATRON_ENGINES}:MegatronEngineWithValueHead", ENGINE.format("value_model")),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngine.__init__", closed=True),
    *names(f"{t.MEGATRON_ENGINES}:get_forward_backward_func()"),  # imported from Megatron, called by this name
    # These set the sizes and padding of a model (engine.py, messages.py).
    *names("verl.workers.config:McoreEngineConfig.tensor_model_parallel_size .pipeline_model_parallel_size"),
    *names("verl.workers.config:McoreEngineConfig.context_parallel_size .expert_model_parallel_size"),
    *names("verl.workers.config:McoreEngineConfig.expert_tensor_parallel_size .dynamic_context_parallel"),
    *names("verl.workers.config:McoreEngineConfig.pad_to_length .pad_to_length_bucket .use_remove_padding"),
    *names("verl.models.mcore.util:preprocess_thd_engine :preprocess_bshd_engine"),
    # Workers are built side by side in a process, and updated through verl's own methods (worker.py, fused.py).
    *names(f"{t.RAY_WORKER_GROUPS}:create_colocated_worker_cls :RayWorkerGroup.world_size .execute_all_async"),
    *names("verl.single_controller.base.decorator:collect_lazy_compute_data_proto"),
    # Megatron's parallel state makes its groups with this code (view.py, placement.py).
    *names(f"{STATE}:initialize_model_parallel :create_group :RankGenerator :is_initialized()"),
    *names(f"{STATE}:is_pipeline_first_stage() :is_pipeline_last_stage() :get_pipeline_model_parallel_group()"),
    *names(f"{STATE}:get_context_parallel_world_size() :_DATA_PARALLEL_GROUP :_TENSOR_MODEL_PARALLEL_GROUP"),
    *names(f"{STATE}:_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS :_DATA_PARALLEL_GLOBAL_RANKS :_PIPELINE_MODEL_PARALLEL_GROUP"),
    *names(f"{STATE}:_PIPELINE_GLOBAL_RANKS :RankGenerator.__init__ .get_ranks"),
    # A stage calls Megatron's steps, and repeats the work that Megatron's schedules do around the steps (stage.py).
    *names(
        "megatron.core.pipeline_parallel.schedules:forward_step :backward_step :deallocate_output_tensor "
        ":forward_backward_pipelining_without_interleaving :get_forward_backward_func "
        "megatron.core.utils:get_model_config() :get_model_type() "
        "megatron.core.model_parallel_config:ModelParallelConfig.timers .defer_embedding_wgrad_compute "
        ".num_microbatches_with_partial_activation_checkpoints .no_sync_func .grad_sync_func "
        ".finalize_model_grads_func .deallocate_pipeline_outputs .pipeline_dtype .sequence_parallel "
        "megatron.core.transformer.transformer_config:TransformerConfig.calculate_per_token_loss .fp8 .hidden_size "
        ".fine_grained_activation_offloading .num_moe_experts "
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale() .main_loss_backward_scale"
    ),
    *config(f"{t.MEGATRON_YAML} tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    *config(f"{t.MEGATRON_YAML} expert_model_parallel_size dynamic_context_parallel use_megatron_fsdp qat.enable"),
    *config(f"{t.MEGATRON_YAML} router_replay.mode {t.MODEL_YAML} lora_rank lora.rank mtp.enable"),
    *config(f"{t.PPO_YAML} global_profiler.steps"),
)
