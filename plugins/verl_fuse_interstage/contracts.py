"""Declares contracts: the configuration of verl under which finished samples may not be streamed, or unfinished samples
not moved (refusals.py), and the code that slices rest on."""

from verl_fuse.host.upstream.targets import FSDP_YAML, MEGATRON_YAML, MODEL_YAML, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, ConfigKey, Contract, Function

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_SHARD = f"{_FULLY_SHARD}._fsdp_param:FSDPParam"
_FLAT = "torch.distributed.fsdp._flat_param"
_HANDLE = f"{_FLAT}:FlatParamHandle"
_GROUPS = "megatron.core.process_groups_config:ProcessGroupCollection"
_MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"

CONTRACTS: tuple[Contract, ...] = (
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable", False),
    ConfigKey("verl/trainer/config/reward/reward.yaml", "reward_model.enable_resource_pool", False),
    ConfigKey(ROLLOUT_YAML, "name", "???"),
    ConfigKey(ROLLOUT_YAML, "full_determinism", False),
    ConfigKey(ROLLOUT_YAML, "disaggregation.enabled", False),
    # These keys set the devices of a replica, and how a slice's models use them.
    ConfigKey(ROLLOUT_YAML, "data_parallel_size", int),
    ConfigKey(ROLLOUT_YAML, "pipeline_model_parallel_size", int),
    ConfigKey(FSDP_YAML, "ulysses_sequence_parallel_size", int),
    ConfigKey(FSDP_YAML, "fsdp_size", int),
    ConfigKey(FSDP_YAML, "qat.enable", False),
    ConfigKey("verl/trainer/config/actor/dp_actor.yaml", "ulysses_sequence_parallel_size", int),
    ConfigKey("verl/trainer/config/ref/dp_ref.yaml", "ulysses_sequence_parallel_size", object),
    ConfigKey(MODEL_YAML, "lora_rank", int),
    ConfigKey(MODEL_YAML, "lora.rank", int),
    ConfigKey(MODEL_YAML, "lora_adapter_path", object),
    ConfigKey("verl/trainer/config/engine/megatron.yaml", "virtual_pipeline_model_parallel_size", object),
    ConfigGroup(PPO_YAML, "reward@reward: reward"),
    ConfigGroup("verl/trainer/config/actor/megatron_actor.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/ref/megatron_ref.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/critic/megatron_critic.yaml", "../engine@megatron: megatron"),
)
# With layout "slices" these are the attributes that FSDP2 and FSDP1 gather from, where their shards are offloaded
# (host/inference/sharded.py).
SLICE_CONTRACTS: tuple[Contract, ...] = (
    Function(f"{_SHARD}.all_gather_inputs", "property (self)", ("23969bf1c26098e3", "dd57b93d8863ea93")),
    Attribute(f"{_SHARD}._sharded_param_data"),
    Attribute(f"{_SHARD}.device"),
    Attribute(f"{_FULLY_SHARD}._fsdp_state:FSDPState._fsdp_param_group"),
    Attribute(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup.fsdp_params"),
    Function(
        f"{_FULLY_SHARD}._fully_shard:FSDPModule.unshard",
        "(self, async_op=False)",
        ("1e7e4f29ccbde75f", "0732eeae3eb2a1ae"),
    ),
    # This function looks the shards up anew, once.
    Function(
        f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup.lazy_init", "(self)", ("1061bfd0ee9ae4c4", "9a6c0d50ed34f3b0")
    ),
    Function(f"{_FULLY_SHARD}._fully_shard:FSDPModule.reshard", "(self)", ("6cd4d459179e61e6", "dbdb60fa3e062345")),
    Attribute(f"{_FLAT}:FlatParameter._local_shard"),
    Attribute(f"{_HANDLE}._offload_params"),
    Attribute(f"{_HANDLE}.flat_param"),
    Attribute(f"{_HANDLE}.device"),
    Attribute(f"{_HANDLE}.uses_sharded_strategy"),
    Function(f"{_HANDLE}.pre_unshard", "(self)", "e90663f81f5439f2"),
    Function(f"{_HANDLE}._use_low_precision_shard", "(self)", "1fa1d87ce21d1d73"),
    Function(f"{_HANDLE}._use_sharded_flat_param", "(self)", "48ae12475b081a3e"),
    Function(f"{_HANDLE}.reshard", "(self, free_unsharded_flat_param)", "601d081299031eea"),
    Function(f"{_HANDLE}.post_reshard", "(self)", "fd8aa4455b235622"),
    Function("torch.distributed.fsdp._runtime_utils:_lazy_init", "(state, root_module)", "3c08816b7ca4c4e5"),
    Function("torch.distributed.fsdp._traversal_utils:_get_fsdp_handles", "(module)", "532b323bc8f216a2"),
)
# The same on Megatron: the cut of a model (host/weights/whole_megatron.py), and the settings that differ in its copies
# (host/inference/megatron_copies.py).
MEGATRON_SLICE_CONTRACTS: tuple[Contract, ...] = (
    Function("verl.utils.megatron_utils:unwrap_model", "(model, module_instances=...)", "eaa2391a20e614e8"),
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    Attribute("megatron.core.models.gpt.gpt_model:GPTModel.share_embeddings_and_output_weights"),
    Attribute("megatron.core.models.common.language_module.language_module:LanguageModule.pg_collection"),
    Attribute(f"{_GROUPS}.tp"),
    Attribute(f"{_GROUPS}.pp"),
    Attribute(f"{_GROUPS}.dp_cp"),
    Attribute(f"{_GROUPS}.ep"),
    Attribute(f"{_GROUPS}.expt_tp"),
    Attribute(f"{_GROUPS}.expt_dp"),
    Attribute("megatron.core.transformer.module:MegatronModule.config"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.num_moe_experts"),
    Attribute("megatron.core.transformer.transformer_config:TransformerConfig.gated_linear_unit"),
    Attribute("megatron.core.transformer.transformer_layer:TransformerLayer.layer_number"),
    Function(
        "megatron.core.tensor_parallel.layers:set_tensor_model_parallel_attributes",
        "(tensor, is_parallel, dim, stride)",
        "cc4a76406eefbfe6",
    ),
    # These attributes tell the memory that a rank keeps (weights/megatron_memory.py).
    Attribute("megatron.core.models.gpt.gpt_model:GPTModel.vocab_size", "vocab_size"),
    Attribute("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.buffers"),
    Attribute("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.expert_parallel_buffers"),
    Attribute("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.grad_data"),
    Attribute("megatron.core.optimizer.optimizer:MegatronOptimizer.param_groups"),
    Attribute("megatron.core.optimizer.optimizer:MegatronOptimizer.state"),
    Function(f"{_MEGATRON_ENGINE}.is_param_offload_enabled", "property (self)"),
    Function(f"{_MEGATRON_ENGINE}.is_optimizer_offload_enabled", "property (self)"),
    Attribute(f"{_MEGATRON_ENGINE}.optimizer"),
    Attribute(f"{_MEGATRON_ENGINE}.module"),
    Function(f"{_MEGATRON_ENGINE}.eval_mode", "(self, **kwargs)", "40eb6570fb4a74b5"),
    Function(f"{_MEGATRON_ENGINE}._init_device_mesh", "(self)", "84295086446f9376"),
    Attribute("verl.workers.config:McoreEngineConfig.expert_tensor_parallel_size"),
    ConfigKey(MEGATRON_YAML, "dtype", "bfloat16"),
    ConfigKey(MEGATRON_YAML, "forward_only", bool),
    ConfigKey(MEGATRON_YAML, "tensor_model_parallel_size", int),
    ConfigKey(MEGATRON_YAML, "pipeline_model_parallel_size", int),
    ConfigKey(MEGATRON_YAML, "expert_model_parallel_size", int),
    ConfigKey(MEGATRON_YAML, "expert_tensor_parallel_size", object),
    ConfigKey(MEGATRON_YAML, "param_offload", bool),
    ConfigKey(MEGATRON_YAML, "optimizer_offload", bool),
    ConfigKey(MEGATRON_YAML, "context_parallel_size", int),
    ConfigKey(MEGATRON_YAML, "dynamic_context_parallel", bool),
    ConfigKey(MEGATRON_YAML, "use_megatron_fsdp", bool),
    ConfigKey(MEGATRON_YAML, "qat.enable", bool),
    ConfigKey(MEGATRON_YAML, "router_replay.mode", "disabled"),
    ConfigKey(MEGATRON_YAML, "override_transformer_config", dict),
    ConfigKey(MODEL_YAML, "mtp.enable", bool),
)
