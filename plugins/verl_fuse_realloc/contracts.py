"""Declares contracts: the code that the features of `realloc` rest on; a run checks those of its engine.

A sync of shards rests on how verl's worker hands weights to its rollout, on the contents of its engine, and on the
configuration that is required or refused (refusals.py).
"""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, config, names

LM_ENGINE = f"{t.MEGATRON_ENGINES}:MegatronEngineWithLMHead"
ROLLOUT = "verl.workers.rollout.vllm_rollout"
LAYERS = "vllm.model_executor.layers"

SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam: the worker hands the weights that the engine exports to its rollout (hybrid.py).
    *names(f"{t.FSDP_ENGINE}.get_per_tensor_param {t.WORKER}.config"),
    *names("verl.single_controller.base.worker:Worker.world_size()"),
    # Whole parameters go to the vLLM worker of the same rank, whose weight loaders cut out its part.
    *names(f"{ROLLOUT}.vllm_rollout:ServerAdapter.update_weights .__init__"),
    *names(f"{ROLLOUT}.bucketed_weight_transfer:BucketedWeightSender.async_send_weights"),
    *names(f"{ROLLOUT}.utils:vLLMColocateWorkerExtension._update_weights {LAYERS}.linear:QKVParallelLinear"),
    *names(f"{LAYERS}.linear:QKVParallelLinear.weight_loader :RowParallelLinear.weight_loader"),
    *names(f"{LAYERS}.linear:MergedColumnParallelLinear.weight_loader"),
    *names(f"{LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.weight_loader"),
    *config(f"{t.MODEL_YAML} lora_rank:int lora.rank:int mtp.enable:bool {t.FSDP_YAML} qat.enable:bool"),
    *config(f"{t.PPO_YAML} actor_rollout_ref.hybrid_engine:bool {t.ROLLOUT_YAML} dtype tensor_model_parallel_size:int"),
    *config(f"{t.ROLLOUT_YAML} quantization disaggregation.enabled:bool data_parallel_size expert_parallel_size"),
    *config(f"{t.ROLLOUT_YAML} pipeline_model_parallel_size checkpoint_engine.update_weights_bucket_megabytes"),
)
MEGATRON_SYNC_CONTRACTS: tuple[Contract, ...] = (
    # The seam, and the contents of the engine: a pipeline's parts on this rank, wrapped (sync/megatron.py).
    *names(f"verl.utils.megatron_utils:load_megatron_model_to_gpu :unwrap_model {LM_ENGINE}.get_per_tensor_param"),
    *names(f"{LM_ENGINE}._build_megatron_module .module .model_config .is_param_offload_enabled()"),
    # The model has groups of its own, a padded vocabulary and blocks per stage.
    Class("megatron.core.models.gpt:GPTModel", ("LanguageModule",)),
    *names("megatron.core.models.gpt.gpt_model:GPTModel.vocab_size="),
    *names("megatron.core.models.common.language_module.language_module:LanguageModule.pg_collection"),
    *names("megatron.core.process_groups_config:ProcessGroupCollection.tp .pp .dp .cp .ep .expt_tp"),
    *names("megatron.core.transformer:TransformerConfig.fp8 megatron.core.transformer.module:MegatronModule.config"),
    *names("megatron.core.transformer.transformer_config:TransformerConfig.pipeline_model_parallel_layout="),
    *names("megatron.core.transformer.transformer_block:get_num_layers_to_build"),
    # mbridge fuses and cuts loaded weights with this code, which reshard/megatron.py repeats.
    *names("mbridge.core.bridge:Bridge._weight_to_mcore_format ._weight_split_across_tp"),
    *config(f"{t.MEGATRON_YAML} virtual_pipeline_model_parallel_size expert_tensor_parallel_size:any qat.enable:bool"),
    *config(f"{t.MEGATRON_YAML} context_parallel_size:int dynamic_context_parallel:bool use_megatron_fsdp:bool"),
    *config(f"{t.MEGATRON_YAML} override_transformer_config:dict"),
)
