"""Declares contracts: the code that the features of `realloc` rest on; a run checks the contracts of the features that
it uses.

A sync of shards rests on how verl's worker hands weights to its rollout, on the contents of its engine, and on the
configuration refused. A change of layout rests on how verl builds an FSDP2 engine, which is done again, and on the
parts of the engine that are kept. Every fingerprint was taken, and the code behind it read, at verl 0.9.1, vLLM 0.24.0
and 0.28.0, torch 2.11.0 and 2.13.0, megatron-core 0.16.1 and mbridge 0.15.1.
"""

from verl_fuse.host.upstream.targets import (
    ENGINE_WORKERS,
    FSDP_ENGINE,
    FSDP_YAML,
    MEGATRON_YAML,
    MODEL_YAML,
    PPO_YAML,
    ROLLOUT_YAML,
)
from verl_fuse.spec.contract import Attribute, Class, Contract, Decorator, Function, config_keys, names

MEGATRON_LM_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"
COMPOSABLE = "torch.distributed._composable.contract"
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
FSDP_STATE = f"{FULLY_SHARD}._fsdp_state:FSDPState"
FSDP_PARAM_GROUP = f"{FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"

SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam: the worker hands the weights that the engine exports to its rollout (hybrid.py).
    *names(FSDP_ENGINE, "get_per_tensor_param"),
    *names(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", "config"),
    *names("verl.single_controller.base.worker:Worker", "world_size()"),
    # Whole parameters go to the vLLM worker of the same rank, whose weight loaders cut out its part.
    *names(f"{VLLM_ROLLOUT}.vllm_rollout:ServerAdapter", "update_weights __init__"),
    *names(f"{VLLM_ROLLOUT}.bucketed_weight_transfer:BucketedWeightSender", "async_send_weights"),
    *names(f"{VLLM_ROLLOUT}.utils:vLLMColocateWorkerExtension", "_update_weights"),
    *names("vllm.model_executor.layers.linear", "QKVParallelLinear"),
    *names("vllm.model_executor.layers.linear:QKVParallelLinear", "weight_loader"),
    *names("vllm.model_executor.layers.linear:MergedColumnParallelLinear", "weight_loader"),
    *names("vllm.model_executor.layers.linear:RowParallelLinear", "weight_loader"),
    *names("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", "weight_loader"),
    # This configuration is required, or refused (refusals.py).
    *config_keys(
        ROLLOUT_YAML,
        "dtype tensor_model_parallel_size:int checkpoint_engine.update_weights_bucket_megabytes quantization "
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size disaggregation.enabled:bool",
    ),
    *config_keys(FSDP_YAML, "qat.enable:bool"),
    *config_keys(MODEL_YAML, "lora_rank:int lora.rank:int mtp.enable:bool"),
    *config_keys(PPO_YAML, "actor_rollout_ref.hybrid_engine:bool"),
)
MEGATRON_SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam, and the contents of the engine: the parts of a pipeline on this rank, wrapped
    # (weights/sync/megatron.py).
    *names(
        MEGATRON_LM_ENGINE, "get_per_tensor_param _build_megatron_module module model_config is_param_offload_enabled()"
    ),
    *names("verl.utils.megatron_utils", "load_megatron_model_to_gpu"),
    Function("verl.utils.megatron_utils:unwrap_model", "(model, module_instances=...)", "eaa2391a20e614e8"),
    # The model has groups of its own, a padded vocabulary and blocks per stage.
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    Attribute("megatron.core.models.gpt.gpt_model:GPTModel.vocab_size", "vocab_size"),
    *names("megatron.core.transformer.module:MegatronModule", "config"),
    *names("megatron.core.models.common.language_module.language_module:LanguageModule", "pg_collection"),
    *names("megatron.core.process_groups_config:ProcessGroupCollection", "tp pp dp cp ep expt_tp"),
    *names("megatron.core.transformer:TransformerConfig", "fp8"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.pipeline_model_parallel_layout", "None"),
    *names("megatron.core.transformer.transformer_block", "get_num_layers_to_build"),
    # mbridge fuses and cuts loaded weights with this code, which reshard/megatron.py repeats.
    *names("mbridge.core.bridge:Bridge", "_weight_to_mcore_format _weight_split_across_tp"),
    # This configuration is refused (refusals.py).
    *config_keys(
        MEGATRON_YAML,
        "virtual_pipeline_model_parallel_size expert_tensor_parallel_size:any context_parallel_size:int "
        "dynamic_context_parallel:bool use_megatron_fsdp:bool qat.enable:bool override_transformer_config:dict",
    ),
)
LAYOUT_CONTRACTS: tuple[Contract, ...] = (
    # verl prepares a module for training in shards with this code, which runs again over another mesh
    # (layouts/change.py); verl keeps these parts of the mesh.
    *names("verl.utils.fsdp_utils", "apply_fsdp2 _select_fsdp2_wrap_targets maybe_patch_fsdp_module"),
    *names("verl.workers.engine.fsdp.utils", "create_device_mesh"),
    *names(FSDP_ENGINE, "_init_device_mesh _build_optimizer"),
    *names("verl.workers.engine.fsdp.transformer_impl:EngineEvalModeCtx", "__exit__"),
    Attribute("verl.workers.config:FSDPEngineConfig.fsdp_size", "-1"),
    *names("verl.workers.config:FSDPEngineConfig", "reshard_after_forward"),
    # torch's `fully_shard` leaves these on a module; all of them are taken off again (layouts/unwrap.py).
    *names(FSDP_STATE, "init _pre_forward_hook_handle _post_forward_hook_handle"),
    Attribute(f"{FSDP_STATE}._fsdp_param_group"),
    Attribute(f"{FSDP_STATE}._modules", "modules"),
    Attribute(f"{FSDP_STATE}._mp_policy", "mp_policy"),
    *names(
        FSDP_PARAM_GROUP,
        "_register_state_dict_hooks _module_to_pre_save_state_dict_hook_handle "
        "_module_to_pre_load_state_dict_hook_handle fsdp_params",
    ),
    Attribute(f"{FSDP_PARAM_GROUP}.offload_policy", "offload_policy"),
    *names(f"{FULLY_SHARD}._fsdp_param:FSDPParam", "_post_load_hook_handle"),
    *names(f"{FULLY_SHARD}._fsdp_init", "_apply_to_module"),
    *names(f"{FULLY_SHARD}._fully_shard:FSDPModule", "reshard"),
    *names(COMPOSABLE, "contract STATE_KEY REGISTRY_KEY"),
    *names("torch.distributed._composable_state", "_module_state_mapping _insert_module_state"),
    # A checkpoint is loaded in the layout in which it was written (layouts/worker.py).
    *names(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", "load_checkpoint"),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.load_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "load_checkpoint"),
    Decorator(f"{ENGINE_WORKERS}:TrainingWorker.load_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    # This configuration is required, changed, or refused (schedule.py).
    *config_keys(FSDP_YAML, "fsdp_size ulysses_sequence_parallel_size offload_policy"),
    *config_keys(MODEL_YAML, "enable_activation_offload"),
)
