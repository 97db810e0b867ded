"""Declares contracts: the code that a fused update rests on (verl's Megatron engines and workers, Megatron's parallel
state and steps), and the configuration refused.

Runs that train fused check these contracts. Every fingerprint was taken, and the code behind it read, at verl 0.9.1 and
megatron-core 0.16.1.
"""

from verl_fuse.host.upstream.targets import MEGATRON_YAML, MODEL_YAML, PPO_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Decorator, Function

CONTRACTS: tuple[Contract, ...] = (
    # Engines are found by vendor, one class per kind of model; all of a model's parallel state is in one place
    # (engine.py, fusion.py).
    Function(
        "verl.workers.engine.base:EngineRegistry.register",
        "class (cls, model_type, backend, device='cuda', vendor=None)",
        "7b34a4001ae8f2d7",
    ),
    Function(
        "verl.workers.engine.base:EngineRegistry.new",
        "class (cls, model_type, backend, *args, **kwargs)",
        "c8647a91065a4862",
    ),
    Decorator(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead",
        "EngineRegistry.register(model_type='language_model', backend='megatron')",
    ),
    Decorator(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead",
        "EngineRegistry.register(model_type='value_model', backend='megatron')",
    ),
    Class("verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"),
    Class("verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead"),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.__init__",
        "(self, model_config, engine_config, optimizer_config, checkpoint_config)",
        "d2229f9b1f3e4ca8",
        closed=True,
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine._init_device_mesh", "(self)", "84295086446f9376"
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.get_per_tensor_param",
        "(self, base_sync_done=False, **kwargs)",
        "3e23c0477ca95e4c",
    ),
    Function("verl.workers.engine.megatron.transformer_impl:MegatronEngine.initialize", "(self)", "abea2a4e0a2e7df5"),
    Attribute("verl.workers.engine.megatron.transformer_impl:MegatronEngine.tf_config"),
    Attribute("verl.workers.engine.megatron.transformer_impl:MegatronEngine.engine_config"),
    Attribute("verl.workers.engine.megatron.transformer_impl:MegatronEngine.module"),
    # The module imports this function from Megatron, and calls it by this name.
    Function("verl.workers.engine.megatron.transformer_impl:get_forward_backward_func", "(pp_size=None, vp_size=None)"),
    # These set the sizes and padding of a model (engine.py, messages.py).
    Attribute("verl.workers.config:McoreEngineConfig.tensor_model_parallel_size"),
    Attribute("verl.workers.config:McoreEngineConfig.pipeline_model_parallel_size"),
    Attribute("verl.workers.config:McoreEngineConfig.context_parallel_size"),
    Attribute("verl.workers.config:McoreEngineConfig.expert_model_parallel_size"),
    Attribute("verl.workers.config:McoreEngineConfig.expert_tensor_parallel_size"),
    Attribute("verl.workers.config:McoreEngineConfig.dynamic_context_parallel"),
    Attribute("verl.workers.config:McoreEngineConfig.pad_to_length"),
    Attribute("verl.workers.config:McoreEngineConfig.pad_to_length_bucket"),
    Attribute("verl.workers.config:McoreEngineConfig.use_remove_padding"),
    Function(
        "verl.models.mcore.util:preprocess_thd_engine",
        "(input_ids, pre_process=True, need_roll=False, use_fp8_padding=False, local_cp_size=None, "
        "min_local_rows=None, pad_to_length_bucket=None, cp_layout='zigzag')",
        "fdeecd3d558385e6",
    ),
    Function(
        "verl.models.mcore.util:preprocess_bshd_engine",
        "(input_ids, pre_process=True, need_roll=False, use_fp8_padding=False, forced_max_seqlen=None)",
        "8c3e9664f94803b3",
    ),
    # Workers are built side by side in one process, and updated through verl's own methods (worker.py,
    # update/fused.py).
    Function("verl.single_controller.ray.base:create_colocated_worker_cls", "(class_dict)", "2692e654d22db785"),
    Function("verl.single_controller.ray.base:RayWorkerGroup.world_size", "property (self)", "87e1621418bf100a"),
    Function(
        "verl.single_controller.base.decorator:collect_lazy_compute_data_proto",
        "(mesh_name, worker_group, *args, **kwargs)",
        "de1129ffd68d1969",
    ),
    Function(
        "verl.single_controller.ray.base:RayWorkerGroup.execute_all_async",
        "(self, method_name, *args, **kwargs)",
        "18e90cee9e84b7a7",
    ),
    # Megatron's parallel state makes its groups with this code (view.py, placement.py).
    Function(
        "megatron.core.parallel_state:initialize_model_parallel",
        "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, "
        "pipeline_model_parallel_comm_backend=None, use_sharp=False, context_parallel_size=1, "
        "hierarchical_context_parallel_sizes=None, hybrid_context_parallel=False, expert_model_parallel_size=1, "
        "num_distributed_optimizer_instances=1, expert_tensor_parallel_size=None, nccl_communicator_config_path=None, "
        "distributed_timeout_minutes=30, order='tp-cp-ep-dp-pp', get_embedding_ranks=None, "
        "get_position_embedding_ranks=None, create_gloo_process_groups=True, high_priority_stream_groups=None, "
        "sharp_enabled_group=None, create_all_gather_group=False)",
        "b4dd1d6922d8ba39",
    ),
    Function(
        "megatron.core.parallel_state:create_group",
        "(ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, group_desc=None)",
        "8b7f50fd95829eea",
    ),
    Class("megatron.core.parallel_state:RankGenerator"),
    Function(
        "megatron.core.parallel_state:RankGenerator.__init__",
        "(self, tp, ep, dp, pp, cp, order, rank_offset=0)",
        "fa4a3a3a624e64f7",
    ),
    Function("megatron.core.parallel_state:RankGenerator.get_ranks", "(self, token)", "703e0cd498068d3a"),
    Function("megatron.core.parallel_state:is_initialized", "()"),
    Function("megatron.core.parallel_state:get_pipeline_model_parallel_group", "(check_initialized=True)"),
    Function("megatron.core.parallel_state:is_pipeline_first_stage", "(ignore_virtual=True, vp_stage=None)"),
    Function("megatron.core.parallel_state:is_pipeline_last_stage", "(ignore_virtual=True, vp_stage=None)"),
    Function("megatron.core.parallel_state:get_context_parallel_world_size", "()"),
    Attribute("megatron.core.parallel_state:_TENSOR_MODEL_PARALLEL_GROUP"),
    Attribute("megatron.core.parallel_state:_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    Attribute("megatron.core.parallel_state:_PIPELINE_MODEL_PARALLEL_GROUP"),
    Attribute("megatron.core.parallel_state:_PIPELINE_GLOBAL_RANKS"),
    Attribute("megatron.core.parallel_state:_DATA_PARALLEL_GROUP"),
    Attribute("megatron.core.parallel_state:_DATA_PARALLEL_GLOBAL_RANKS"),
    # A stage calls Megatron's steps, and repeats the work that Megatron's schedules do around the steps (stage.py).
    Function(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
        "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
        "bf3a0e42d32984fc",
    ),
    Function(
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
        "ec9bf8c5a9970d22",
    ),
    Function(
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor",
        "(out, deallocate_pipeline_outputs=False)",
        "91e4fec1bc2de2e8",
    ),
    Function(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
        "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
        "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False)",
        "12add2b942cc6bc4",
    ),
    Function(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "(pp_size=None, vp_size=None)",
        "a71e782fa2369a52",
    ),
    Function("megatron.core.utils:get_model_config", "(model)"),
    Function("megatron.core.utils:get_model_type", "(model)"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.timers"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.defer_embedding_wgrad_compute"),
    Attribute(
        "megatron.core.model_parallel_config:ModelParallelConfig.num_microbatches_with_partial_activation_checkpoints"
    ),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.no_sync_func"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.grad_sync_func"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.finalize_model_grads_func"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.deallocate_pipeline_outputs"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.pipeline_dtype"),
    Attribute("megatron.core.model_parallel_config:ModelParallelConfig.sequence_parallel"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.calculate_per_token_loss"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.fp8"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.hidden_size"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.fine_grained_activation_offloading"),
    # A fused update is refused under this configuration (refusals.py).
    ConfigKey(MEGATRON_YAML, "tensor_model_parallel_size", 1),
    ConfigKey(MEGATRON_YAML, "pipeline_model_parallel_size", 1),
    ConfigKey(MEGATRON_YAML, "context_parallel_size", 1),
    ConfigKey(MEGATRON_YAML, "expert_model_parallel_size", 1),
    ConfigKey(MEGATRON_YAML, "dynamic_context_parallel", False),
    ConfigKey(MEGATRON_YAML, "use_megatron_fsdp", False),
    ConfigKey(MEGATRON_YAML, "qat.enable", False),
    ConfigKey(MEGATRON_YAML, "router_replay.mode", "disabled"),
    ConfigKey(MODEL_YAML, "lora_rank", 0),
    ConfigKey(MODEL_YAML, "lora.rank", 0),
    ConfigKey(MODEL_YAML, "mtp.enable", False),
    ConfigKey(PPO_YAML, "global_profiler.steps", None),
)
