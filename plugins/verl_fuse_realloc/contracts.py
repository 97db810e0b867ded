"""What a sync of shards rests on: how verl's worker hands weights to its rollout, what its engine holds, and the configuration refused.

Asked for by runs that send shards; every fingerprint was taken, and the code behind it read, at verl 0.9.1 and vLLM 0.28.0.
"""

from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Function

PPO = "verl/trainer/config/ppo_trainer.yaml"
ROLLOUT = "verl/trainer/config/rollout/rollout.yaml"
MODEL = "verl/trainer/config/model/hf_model.yaml"
FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
VLLM = "verl.workers.rollout.vllm_rollout"

CONTRACTS: tuple[Contract, ...] = (
    # The seam: what the engine exports is what the worker hands to its rollout (hybrid.py).
    Function(
        f"{FSDP}.get_per_tensor_param",
        "(self, layered_summon=False, base_sync_done=False, **kwargs)",
        "87832a9f5f13e4b9",
    ),
    Attribute(f"{FSDP}.model_config"),
    Attribute("verl.workers.config:HFModelConfig.hf_config"),
    Attribute("verl.workers.engine_workers:ActorRolloutRefWorker.config"),
    Function("verl.single_controller.base.worker:Worker.world_size", "property (self)"),
    # Whole parameters go to the vLLM worker of the same rank, whose weight loaders cut out its part.
    Function(
        f"{VLLM}.vllm_rollout:ServerAdapter.update_weights",
        "async (self, weights, global_steps=None, wire_format='named_tensors', **kwargs)",
        "6bfc73fa324fa9bd",
    ),
    Function(
        f"{VLLM}.vllm_rollout:ServerAdapter.__init__",
        "(self, config, model_config, device_mesh, replica_rank=-1)",
        "21f75ca73fa0e504",
    ),
    Function(
        f"{VLLM}.bucketed_weight_transfer:BucketedWeightSender.async_send_weights",
        "async (self, weights)",
        "b42077c49bd2153e",
    ),
    Function(
        f"{VLLM}.utils:vLLMColocateWorkerExtension._update_weights",
        "(self, weights, peft_config, base_sync_done)",
        "14aa30382bd76b35",
    ),
    Class("vllm.model_executor.layers.linear:QKVParallelLinear"),
    Function(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader",
        "(self, param, loaded_weight, loaded_shard_id=None)",
        "9889b3be43042c6e",
    ),
    Function(
        "vllm.model_executor.layers.linear:MergedColumnParallelLinear.weight_loader",
        "(self, param, loaded_weight, loaded_shard_id=None)",
        "a5526f5767de1ac9",
    ),
    Function(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader",
        "(self, param, loaded_weight)",
        "0ec4b4aed9214350",
    ),
    Function(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.weight_loader",
        "(self, param, loaded_weight)",
        "f61a9646cb70d2c9",
    ),
    # Configuration that is required, or refused (refusals.py).
    ConfigKey(ROLLOUT, "dtype", "bfloat16"),
    ConfigKey(ROLLOUT, "tensor_model_parallel_size", int),
    ConfigKey(ROLLOUT, "checkpoint_engine.update_weights_bucket_megabytes", 2048),
    ConfigKey(ROLLOUT, "quantization", None),
    ConfigKey(ROLLOUT, "data_parallel_size", 1),
    ConfigKey(ROLLOUT, "expert_parallel_size", 1),
    ConfigKey(ROLLOUT, "pipeline_model_parallel_size", 1),
    ConfigKey(ROLLOUT, "disaggregation.enabled", bool),
    ConfigKey("verl/trainer/config/engine/fsdp.yaml", "qat.enable", bool),
    ConfigKey(MODEL, "lora_rank", int),
    ConfigKey(MODEL, "lora.rank", int),
    ConfigKey(MODEL, "mtp.enable", bool),
    ConfigKey(PPO, "actor_rollout_ref.hybrid_engine", bool),
)
