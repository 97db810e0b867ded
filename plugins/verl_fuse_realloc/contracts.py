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
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Decorator, Function

MEGATRON_LM_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"
COMPOSABLE = "torch.distributed._composable.contract"
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
FSDP_STATE = f"{FULLY_SHARD}._fsdp_state:FSDPState"
FSDP_PARAM_GROUP = f"{FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"

SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam: the worker hands the weights that the engine exports to its rollout (hybrid.py).
    Function(
        f"{FSDP_ENGINE}.get_per_tensor_param",
        "(self, layered_summon=False, base_sync_done=False, **kwargs)",
        "87832a9f5f13e4b9",
    ),
    Attribute(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.config"),
    Function("verl.single_controller.base.worker:Worker.world_size", "property (self)"),
    # Whole parameters go to the vLLM worker of the same rank, whose weight loaders cut out its part.
    Function(
        f"{VLLM_ROLLOUT}.vllm_rollout:ServerAdapter.update_weights",
        "async (self, weights, global_steps=None, wire_format='named_tensors', **kwargs)",
        "6bfc73fa324fa9bd",
    ),
    Function(
        f"{VLLM_ROLLOUT}.vllm_rollout:ServerAdapter.__init__",
        "(self, config, model_config, device_mesh, replica_rank=-1)",
        "21f75ca73fa0e504",
    ),
    Function(
        f"{VLLM_ROLLOUT}.bucketed_weight_transfer:BucketedWeightSender.async_send_weights",
        "async (self, weights)",
        "b42077c49bd2153e",
    ),
    Function(
        f"{VLLM_ROLLOUT}.utils:vLLMColocateWorkerExtension._update_weights",
        "(self, weights, peft_config, base_sync_done)",
        "14aa30382bd76b35",
    ),
    Class("vllm.model_executor.layers.linear:QKVParallelLinear"),
    Function(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader",
        "(self, param, loaded_weight, loaded_shard_id=None)",
        ("7b8a2723566029be", "9889b3be43042c6e"),
    ),
    Function(
        "vllm.model_executor.layers.linear:MergedColumnParallelLinear.weight_loader",
        "(self, param, loaded_weight, loaded_shard_id=None)",
        ("8e583323c6dc5f4f", "a5526f5767de1ac9"),
    ),
    Function(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader",
        "(self, param, loaded_weight)",
        ("83b91e3c22b949de", "0ec4b4aed9214350"),
    ),
    Function(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.weight_loader",
        "(self, param, loaded_weight)",
        "f61a9646cb70d2c9",
    ),
    # This configuration is required, or refused (refusals.py).
    ConfigKey(ROLLOUT_YAML, "dtype", "bfloat16"),
    ConfigKey(ROLLOUT_YAML, "tensor_model_parallel_size", int),
    ConfigKey(ROLLOUT_YAML, "checkpoint_engine.update_weights_bucket_megabytes", 2048),
    ConfigKey(ROLLOUT_YAML, "quantization", None),
    ConfigKey(ROLLOUT_YAML, "data_parallel_size", 1),
    ConfigKey(ROLLOUT_YAML, "expert_parallel_size", 1),
    ConfigKey(ROLLOUT_YAML, "pipeline_model_parallel_size", 1),
    ConfigKey(ROLLOUT_YAML, "disaggregation.enabled", bool),
    ConfigKey(FSDP_YAML, "qat.enable", bool),
    ConfigKey(MODEL_YAML, "lora_rank", int),
    ConfigKey(MODEL_YAML, "lora.rank", int),
    ConfigKey(MODEL_YAML, "mtp.enable", bool),
    ConfigKey(PPO_YAML, "actor_rollout_ref.hybrid_engine", bool),
)
MEGATRON_SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam, and the contents of the engine: the parts of a pipeline on this rank, wrapped
    # (weights/sync/megatron.py).
    Function(
        f"{MEGATRON_LM_ENGINE}.get_per_tensor_param", "(self, base_sync_done=False, **kwargs)", "3e23c0477ca95e4c"
    ),
    Function(f"{MEGATRON_LM_ENGINE}._build_megatron_module", "(self)", "2d5533165fc11f9a"),
    Attribute(f"{MEGATRON_LM_ENGINE}.module"),
    Attribute(f"{MEGATRON_LM_ENGINE}.model_config"),
    Function(f"{MEGATRON_LM_ENGINE}.is_param_offload_enabled", "property (self)"),
    Function(
        "verl.utils.megatron_utils:load_megatron_model_to_gpu",
        "(models, load_grad=True, load_frozen_params=True)",
        "3fb6bcdc82bd33c0",
    ),
    Function("verl.utils.megatron_utils:unwrap_model", "(model, module_instances=...)", "eaa2391a20e614e8"),
    # The model has groups of its own, a padded vocabulary and blocks per stage.
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    Attribute("megatron.core.models.gpt.gpt_model:GPTModel.vocab_size", "vocab_size"),
    Attribute("megatron.core.transformer.module:MegatronModule.config"),
    Attribute("megatron.core.models.common.language_module.language_module:LanguageModule.pg_collection"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.tp"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.pp"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.dp"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.cp"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.ep"),
    Attribute("megatron.core.process_groups_config:ProcessGroupCollection.expt_tp"),
    Attribute("megatron.core.transformer:TransformerConfig.fp8"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.pipeline_model_parallel_layout", "None"),
    Function(
        "megatron.core.transformer.transformer_block:get_num_layers_to_build",
        "(config, vp_stage=None, pp_rank=None)",
        "9806e644bef0f4ec",
    ),
    # mbridge fuses and cuts loaded weights with this code, which reshard/megatron.py repeats.
    Function(
        "mbridge.core.bridge:Bridge._weight_to_mcore_format",
        "(self, mcore_weights_name, hf_weights)",
        "82edc3089a405f2a",
    ),
    Function(
        "mbridge.core.bridge:Bridge._weight_split_across_tp",
        "(self, mcore_weights_name, mcore_weights, param, tp_split_size)",
        "52436420480f88e0",
    ),
    # This configuration is refused (refusals.py).
    ConfigKey(MEGATRON_YAML, "virtual_pipeline_model_parallel_size", None),
    ConfigKey(MEGATRON_YAML, "expert_tensor_parallel_size", object),
    ConfigKey(MEGATRON_YAML, "context_parallel_size", int),
    ConfigKey(MEGATRON_YAML, "dynamic_context_parallel", bool),
    ConfigKey(MEGATRON_YAML, "use_megatron_fsdp", bool),
    ConfigKey(MEGATRON_YAML, "qat.enable", bool),
    ConfigKey(MEGATRON_YAML, "override_transformer_config", dict),
)
LAYOUT_CONTRACTS: tuple[Contract, ...] = (
    # verl prepares a module for training in shards with this code, which runs again over another mesh
    # (layouts/change.py); verl keeps these parts of the mesh.
    Function("verl.utils.fsdp_utils:apply_fsdp2", "(model, fsdp_kwargs, config)", "e93a5faa3a7eb130"),
    Function(
        "verl.utils.fsdp_utils:_select_fsdp2_wrap_targets",
        "(model, fsdp_transformer_layer_cls_to_wrap)",
        "c966f58829ec9433",
    ),
    Function("verl.utils.fsdp_utils:maybe_patch_fsdp_module", "(model)", "22e7b8d376e48860"),
    Function("verl.workers.engine.fsdp.utils:create_device_mesh", "(world_size, fsdp_size)", "59d012ca6742cd32"),
    Function(f"{FSDP_ENGINE}._init_device_mesh", "(self)", "277b73c4f53c1c8e"),
    Function(f"{FSDP_ENGINE}._build_optimizer", "(self, module)", "c006302d012d5f4e"),
    Function(
        "verl.workers.engine.fsdp.transformer_impl:EngineEvalModeCtx.__exit__",
        "(self, exc_type, exc_value, traceback)",
        "28bedbdfdb1b5cd3",
    ),
    Attribute("verl.workers.config:FSDPEngineConfig.fsdp_size", "-1"),
    Attribute("verl.workers.config:FSDPEngineConfig.reshard_after_forward"),
    # torch's `fully_shard` leaves these on a module; all of them are taken off again (layouts/unwrap.py).
    Function(
        f"{FSDP_STATE}.init",
        "(self, modules, device, mp_policy, auto_reshard_after_forward)",
        ("3115dc152e5ec1fc", "a28d1f7e41d4bddd"),
    ),
    Attribute(f"{FSDP_STATE}._fsdp_param_group"),
    Attribute(f"{FSDP_STATE}._modules", "modules"),
    Attribute(f"{FSDP_STATE}._mp_policy", "mp_policy"),
    Attribute(f"{FSDP_STATE}._pre_forward_hook_handle"),
    Attribute(f"{FSDP_STATE}._post_forward_hook_handle"),
    Function(f"{FSDP_PARAM_GROUP}._register_state_dict_hooks", "(self)", "d0daab268dfb404b"),
    Attribute(f"{FSDP_PARAM_GROUP}._module_to_pre_save_state_dict_hook_handle"),
    Attribute(f"{FSDP_PARAM_GROUP}._module_to_pre_load_state_dict_hook_handle"),
    Attribute(f"{FSDP_PARAM_GROUP}.fsdp_params"),
    Attribute(f"{FSDP_PARAM_GROUP}.offload_policy", "offload_policy"),
    Attribute(f"{FULLY_SHARD}._fsdp_param:FSDPParam._post_load_hook_handle"),
    Function(
        f"{FULLY_SHARD}._fsdp_init:_apply_to_module",
        "(modules, cls_to_wrapper_cls, wrapper_module_cls, wrapper_cls_prefix, unimplemented_deepcopy)",
        "74a4cda6fc74a890",
    ),
    Function(f"{FULLY_SHARD}._fully_shard:FSDPModule.reshard", "(self)", ("6cd4d459179e61e6", "dbdb60fa3e062345")),
    Function(f"{COMPOSABLE}:contract", "(state_cls=_State)", "0f0d5e7e1c4fe824"),
    Attribute(f"{COMPOSABLE}:STATE_KEY"),
    Attribute(f"{COMPOSABLE}:REGISTRY_KEY"),
    Attribute("torch.distributed._composable_state:_module_state_mapping"),
    Function("torch.distributed._composable_state:_insert_module_state", "(module, state)", "172b64f08b9ede3f"),
    # A checkpoint is loaded in the layout in which it was written (layouts/worker.py).
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.load_checkpoint",
        "(self, local_path, hdfs_path=None, del_local_after_load=False)",
        "fec9c0c0d5c4ce76",
    ),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.load_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    Function(
        f"{ENGINE_WORKERS}:TrainingWorker.load_checkpoint",
        "(self, local_path, hdfs_path=None, del_local_after_load=False)",
        "062bbcfe99b39880",
    ),
    Decorator(f"{ENGINE_WORKERS}:TrainingWorker.load_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    # This configuration is required, changed, or refused (schedule.py).
    ConfigKey(FSDP_YAML, "fsdp_size", -1),
    ConfigKey(FSDP_YAML, "ulysses_sequence_parallel_size", 1),
    ConfigKey(FSDP_YAML, "offload_policy", False),
    ConfigKey(MODEL_YAML, "enable_activation_offload", False),
)
