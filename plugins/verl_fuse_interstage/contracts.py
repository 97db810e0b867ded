"""Declares contracts: the configuration of verl under which finished samples may not be streamed, or unfinished samples
not moved (refusals.py), and the code that slices rest on."""

from verl_fuse.host.upstream.targets import FSDP_YAML, MEGATRON_YAML, MODEL_YAML, PPO_YAML, ROLLOUT_YAML
from verl_fuse.spec.contract import Attribute, Class, ConfigGroup, Contract, Function, config_keys, names

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_SHARD = f"{_FULLY_SHARD}._fsdp_param:FSDPParam"
_FLAT = "torch.distributed.fsdp._flat_param"
_HANDLE = f"{_FLAT}:FlatParamHandle"
_GROUPS = "megatron.core.process_groups_config:ProcessGroupCollection"
_MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"

CONTRACTS: tuple[Contract, ...] = (
    *config_keys("verl/trainer/config/reward/reward.yaml", "reward_model.enable reward_model.enable_resource_pool"),
    *config_keys(ROLLOUT_YAML, "name full_determinism disaggregation.enabled"),
    # These keys set the devices of a replica, and how a slice's models use them.
    *config_keys(ROLLOUT_YAML, "data_parallel_size:int pipeline_model_parallel_size:int"),
    *config_keys(FSDP_YAML, "ulysses_sequence_parallel_size:int fsdp_size:int qat.enable"),
    *config_keys("verl/trainer/config/actor/dp_actor.yaml", "ulysses_sequence_parallel_size:int"),
    *config_keys("verl/trainer/config/ref/dp_ref.yaml", "ulysses_sequence_parallel_size:any"),
    *config_keys(MODEL_YAML, "lora_rank:int lora.rank:int lora_adapter_path:any"),
    *config_keys("verl/trainer/config/engine/megatron.yaml", "virtual_pipeline_model_parallel_size:any"),
    ConfigGroup(PPO_YAML, "reward@reward: reward"),
    ConfigGroup("verl/trainer/config/actor/megatron_actor.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/ref/megatron_ref.yaml", "../engine@megatron: megatron"),
    ConfigGroup("verl/trainer/config/critic/megatron_critic.yaml", "../engine@megatron: megatron"),
)
# With layout "slices" these are the attributes that FSDP2 and FSDP1 gather from, where their shards are offloaded
# (host/inference/sharded.py).
SLICE_CONTRACTS: tuple[Contract, ...] = (
    *names(_SHARD, "all_gather_inputs _sharded_param_data device"),
    Attribute(f"{_FULLY_SHARD}._fsdp_state:FSDPState._fsdp_param_group"),
    *names(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "fsdp_params"),
    *names(f"{_FULLY_SHARD}._fully_shard:FSDPModule", "unshard"),
    # This function looks the shards up anew, once.
    *names(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "lazy_init"),
    *names(f"{_FULLY_SHARD}._fully_shard:FSDPModule", "reshard"),
    *names(f"{_FLAT}:FlatParameter", "_local_shard"),
    *names(
        _HANDLE,
        "_offload_params flat_param device pre_unshard _use_low_precision_shard _use_sharded_flat_param reshard "
        "post_reshard",
    ),
    Attribute(f"{_HANDLE}.uses_sharded_strategy"),
    *names("torch.distributed.fsdp._runtime_utils", "_lazy_init"),
    *names("torch.distributed.fsdp._traversal_utils", "_get_fsdp_handles"),
)
# The same on Megatron: the cut of a model (host/weights/whole_megatron.py), and the settings that differ in its copies
# (host/inference/megatron_copies.py).
MEGATRON_SLICE_CONTRACTS: tuple[Contract, ...] = (
    Function("verl.utils.megatron_utils:unwrap_model", "(model, module_instances=...)", "eaa2391a20e614e8"),
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    *names("megatron.core.models.gpt.gpt_model:GPTModel", "share_embeddings_and_output_weights"),
    *names("megatron.core.models.common.language_module.language_module:LanguageModule", "pg_collection"),
    *names(_GROUPS, "tp pp dp_cp ep expt_tp expt_dp"),
    *names("megatron.core.transformer.module:MegatronModule", "config"),
    *names("megatron.core.transformer.transformer_config:TransformerConfig", "num_moe_experts gated_linear_unit"),
    *names("megatron.core.transformer.transformer_layer:TransformerLayer", "layer_number"),
    *names("megatron.core.tensor_parallel.layers", "set_tensor_model_parallel_attributes"),
    # These attributes tell the memory that a rank keeps (weights/megatron_memory.py).
    Attribute("megatron.core.models.gpt.gpt_model:GPTModel.vocab_size", "vocab_size"),
    *names(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel", "buffers expert_parallel_buffers"
    ),
    *names("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer", "grad_data"),
    *names("megatron.core.optimizer.optimizer:MegatronOptimizer", "param_groups state"),
    *names(
        _MEGATRON_ENGINE,
        "is_param_offload_enabled() is_optimizer_offload_enabled() optimizer module eval_mode _init_device_mesh",
    ),
    *names("verl.workers.config:McoreEngineConfig", "expert_tensor_parallel_size"),
    *config_keys(
        MEGATRON_YAML,
        "dtype forward_only:bool tensor_model_parallel_size:int pipeline_model_parallel_size:int "
        "expert_model_parallel_size:int expert_tensor_parallel_size:any param_offload:bool optimizer_offload:bool "
        "context_parallel_size:int dynamic_context_parallel:bool use_megatron_fsdp:bool qat.enable:bool "
        "router_replay.mode override_transformer_config:dict",
    ),
    *config_keys(MODEL_YAML, "mtp.enable:bool"),
)
