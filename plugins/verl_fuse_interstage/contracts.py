"""Declares contracts: the configuration of verl under which finished samples may not be streamed, or unfinished samples
not moved (refusals.py), and the code that slices rest on."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, config, names

CONTRACTS: tuple[Contract, ...] = (
    *config("verl/trainer/config/reward/reward.yaml reward_model.enable reward_model.enable_resource_pool"),
    *config(f"{t.ROLLOUT_YAML} name full_determinism disaggregation.enabled"),
    # These keys set the devices of a replica, and how a slice's models use them.
    *config(f"{t.ROLLOUT_YAML} data_parallel_size:int pipeline_model_parallel_size:int"),
    *config(f"{t.FSDP_YAML} fsdp_size:int qat.enable ulysses_sequence_parallel_size:int"),
    *config(f"{t.DP_ACTOR_YAML} ulysses_sequence_parallel_size:int {t.DP_REF_YAML} ulysses_sequence_parallel_size:any"),
    *config(f"{t.MODEL_YAML} lora_rank:int lora.rank:int lora_adapter_path:any {t.PPO_YAML} reward@reward"),
    *config(f"{t.MEGATRON_YAML} virtual_pipeline_model_parallel_size:any"),
    *config("verl/trainer/config/actor/megatron_actor.yaml ../engine@megatron"),
    *config("verl/trainer/config/ref/megatron_ref.yaml ../engine@megatron"),
    *config("verl/trainer/config/critic/megatron_critic.yaml ../engine@megatron"),
    # What slices do with a device, and what copies do not do.
    *names("verl.utils.device:get_device_id()"),
    *config(f"{t.ROLLOUT_YAML} checkpoint_engine.backend"),
)
# With layout "slices" these are the attributes that FSDP2 and FSDP1 gather from, where their shards are offloaded
# (slices/sharded.py). `lazy_init` looks the shards up anew, once.
SLICE_CONTRACTS: tuple[Contract, ...] = (
    *names(f"torch.distributed.fsdp._traversal_utils:_get_fsdp_handles {t.FLAT_PARAM}:FlatParameter._local_shard"),
    *names(f"{t.FLAT_PARAM}:FlatParamHandle._use_low_precision_shard ._use_sharded_flat_param .uses_sharded_strategy?"),
    *names(f"{t.FLAT_PARAM}:FlatParamHandle._offload_params .post_reshard .pre_unshard .flat_param .reshard .device"),
    *names(f"{t.FULLY_SHARD}._fsdp_param:FSDPParam._sharded_param_data .all_gather_inputs .device"),
    *names(f"{t.FULLY_SHARD}._fsdp_param_group:FSDPParamGroup.fsdp_params .lazy_init"),
    *names(f"torch.distributed.fsdp._runtime_utils:_lazy_init {t.FULLY_SHARD}._fully_shard:FSDPModule.unshard"),
    *names(f"{t.FULLY_SHARD}._fully_shard:FSDPModule.reshard {t.FULLY_SHARD}._fsdp_state:FSDPState._fsdp_param_group?"),
)
# The same on Megatron: the cut of a model (whole_megatron.py), and settings that differ in copies
# (slices/megatron_copies.py).
MEGATRON_SLICE_CONTRACTS: tuple[Contract, ...] = (
    *names("megatron.core.transformer.module:MegatronModule.config verl.utils.megatron_utils:unwrap_model"),
    *names("megatron.core.models.gpt.gpt_model:GPTModel.share_embeddings_and_output_weights .vocab_size="),
    *names("megatron.core.process_groups_config:ProcessGroupCollection.tp .pp .dp_cp .ep .expt_tp .expt_dp"),
    *names("megatron.core.models.common.language_module.language_module:LanguageModule.pg_collection"),
    *names("megatron.core.tensor_parallel.layers:set_tensor_model_parallel_attributes"),
    *names("megatron.core.transformer.transformer_config:TransformerConfig.num_moe_experts .gated_linear_unit"),
    *names("megatron.core.transformer.transformer_layer:TransformerLayer.layer_number"),
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    # These attributes tell the memory that a rank keeps (weights/megatron_memory.py).
    *names("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.buffers"),
    *names("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.expert_parallel_buffers"),
    *names("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.grad_data"),
    *names("megatron.core.optimizer.optimizer:MegatronOptimizer.param_groups .state"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngine.is_param_offload_enabled() .is_optimizer_offload_enabled()"),
    *names(f"{t.MEGATRON_ENGINES}:MegatronEngine.optimizer .module .eval_mode ._init_device_mesh"),
    *names("verl.workers.config:McoreEngineConfig.expert_tensor_parallel_size"),
    *config(f"{t.MODEL_YAML} mtp.enable:bool {t.MEGATRON_YAML} qat.enable:bool use_megatron_fsdp:bool"),
    *config(f"{t.MEGATRON_YAML} context_parallel_size:int dtype dynamic_context_parallel:bool param_offload:bool"),
    *config(f"{t.MEGATRON_YAML} tensor_model_parallel_size:int expert_tensor_parallel_size:any forward_only:bool"),
    *config(f"{t.MEGATRON_YAML} override_transformer_config:dict optimizer_offload:bool router_replay.mode"),
    *config(f"{t.MEGATRON_YAML} expert_model_parallel_size:int pipeline_model_parallel_size:int"),
)
