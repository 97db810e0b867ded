"""Declares contracts: the code that a fused update rests on (verl's Megatron engines and workers, Megatron's parallel
state and steps), and the configuration refused.

Runs that train fused check these contracts. Every fingerprint was taken, and the code behind it read, at verl 0.9.1 and
megatron-core 0.16.1.
"""

from verl_fuse.host.upstream.targets import MEGATRON_YAML, MODEL_YAML, PPO_YAML
from verl_fuse.spec.contract import Contract, Decorator, config_keys, names

CONTRACTS: tuple[Contract, ...] = (
    # Engines are found by vendor, one class per kind of model; all of a model's parallel state is in one place
    # (engine.py, fusion.py).
    *names("verl.workers.engine.base:EngineRegistry", "register new"),
    Decorator(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead",
        "EngineRegistry.register(model_type='language_model', backend='megatron')",
    ),
    Decorator(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead",
        "EngineRegistry.register(model_type='value_model', backend='megatron')",
    ),
    *names("verl.workers.engine.megatron.transformer_impl", "MegatronEngineWithLMHead MegatronEngineWithValueHead"),
    *names("verl.workers.engine.megatron.transformer_impl:MegatronEngine", "__init__", closed=True),
    *names(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine",
        "_init_device_mesh get_per_tensor_param initialize tf_config engine_config module",
    ),
    # The module imports this function from Megatron, and calls it by this name.
    *names("verl.workers.engine.megatron.transformer_impl", "get_forward_backward_func()"),
    # These set the sizes and padding of a model (engine.py, messages.py).
    *names(
        "verl.workers.config:McoreEngineConfig",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size dynamic_context_parallel pad_to_length pad_to_length_bucket use_remove_padding",
    ),
    *names("verl.models.mcore.util", "preprocess_thd_engine preprocess_bshd_engine"),
    # Workers are built side by side in one process, and updated through verl's own methods (worker.py,
    # update/fused.py).
    *names("verl.single_controller.ray.base", "create_colocated_worker_cls"),
    *names("verl.single_controller.ray.base:RayWorkerGroup", "world_size execute_all_async"),
    *names("verl.single_controller.base.decorator", "collect_lazy_compute_data_proto"),
    # Megatron's parallel state makes its groups with this code (view.py, placement.py).
    *names(
        "megatron.core.parallel_state",
        "initialize_model_parallel create_group RankGenerator is_initialized() get_pipeline_model_parallel_group() "
        "is_pipeline_first_stage() is_pipeline_last_stage() get_context_parallel_world_size() "
        "_TENSOR_MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS _PIPELINE_MODEL_PARALLEL_GROUP "
        "_PIPELINE_GLOBAL_RANKS _DATA_PARALLEL_GROUP _DATA_PARALLEL_GLOBAL_RANKS",
    ),
    *names("megatron.core.parallel_state:RankGenerator", "__init__ get_ranks"),
    # A stage calls Megatron's steps, and repeats the work that Megatron's schedules do around the steps (stage.py).
    *names(
        "megatron.core.pipeline_parallel.schedules",
        "forward_step backward_step deallocate_output_tensor forward_backward_pipelining_without_interleaving "
        "get_forward_backward_func",
    ),
    *names("megatron.core.utils", "get_model_config() get_model_type()"),
    *names(
        "megatron.core.model_parallel_config:ModelParallelConfig",
        "timers defer_embedding_wgrad_compute num_microbatches_with_partial_activation_checkpoints no_sync_func "
        "grad_sync_func finalize_model_grads_func deallocate_pipeline_outputs pipeline_dtype sequence_parallel",
    ),
    *names(
        "megatron.core.transformer.transformer_config:TransformerConfig",
        "calculate_per_token_loss fp8 hidden_size fine_grained_activation_offloading",
    ),
    # A fused update is refused under this configuration (refusals.py).
    *config_keys(
        MEGATRON_YAML,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "dynamic_context_parallel use_megatron_fsdp qat.enable router_replay.mode",
    ),
    *config_keys(MODEL_YAML, "lora_rank lora.rank mtp.enable"),
    *config_keys(PPO_YAML, "global_profiler.steps"),
)
