"""Declares contracts on worker groups of their own on a replica's devices, and on the models in them (slices.py,
slice_worker.py, slice_models.py, buckets.py, assembly.py)."""

from verl_fuse.host.upstream.targets import ENGINE_WORKERS, FSDP_ENGINE, RAY_WORKER_GROUPS
from verl_fuse.spec.contract import Class, Contract, Decorator, config_keys, names

BASE_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"

CONTRACTS: tuple[Contract, ...] = (
    # A world of its own on part of a pool.
    *names(RAY_WORKER_GROUPS, "split_resource_pool"),
    Class(f"{RAY_WORKER_GROUPS}:RayClassWithInitArgs", ("ClassWithInitArgs",)),
    *names(f"{RAY_WORKER_GROUPS}:RayClassWithInitArgs", "__init__"),
    *names(f"{RAY_WORKER_GROUPS}:RayWorkerGroup", "__init__ _init_with_subresource_pool"),
    *names(f"{RAY_WORKER_GROUPS}:ResourcePoolManager", "get_resource_pool"),
    *names(BASE_TRAINER, "processor resource_pool_manager"),
    *names("verl.workers.rollout.replica:RolloutReplica", "world_size"),
    Class("verl.single_controller.base.decorator:Dispatch", ("DynamicEnum",)),
    # A worker that holds models of several kinds, dispatched over a mesh of its own.
    *names("verl.single_controller.base.worker:Worker", "__init__ set_dispatch_collect get_dispatch_collect"),
    # Memory that is given back to the device.
    *names("verl.utils.memory_utils", "aggressive_empty_cache"),
    # Policy and reference as verl builds them, each from its own block.
    *names(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", "__init__ ref actor actor_worker_cls ref_worker_cls"),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.init_model", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    # The critic, from the settings that verl gives its workers.
    *names(BASE_TRAINER, "resource_pool_to_cls"),
    *names("verl.single_controller.base.worker_group:ClassWithInitArgs", "kwargs"),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "reset", closed=True),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "engine engine_config"),
    # With LoRA the policy without adapters is the reference.
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "model_config"),
    *names("verl.workers.config:HFModelConfig", "lora_rank"),
    *names("verl.workers.config", "TrainingWorkerConfig"),
    *names("verl.workers.config:TrainingWorkerConfig", "engine_config"),
    # Differences of a forward-only engine.
    *names("verl.workers.config:EngineConfig", "forward_only"),
    *names("verl.workers.config:FSDPEngineConfig", "model_dtype"),
    *names(FSDP_ENGINE, "_build_module _build_model_optimizer"),
    # The dtype that parameters are rounded to, and the place of a forward-only engine's shards.
    *names(FSDP_ENGINE, "_build_fsdp_module engine_config"),
    *names("verl.workers.config:FSDPEngineConfig", "mixed_precision"),
    *names("verl.utils.torch_dtypes:PrecisionType", "to_dtype"),
    *config_keys("verl/trainer/config/engine/fsdp.yaml", "forward_only:bool model_dtype:str"),
    *config_keys("verl/trainer/config/rollout/rollout.yaml", "checkpoint_engine.backend:str"),
    # The part of a trained model that stays on its device, and its size.
    *names(
        FSDP_ENGINE, "is_optimizer_offload_enabled() _uses_fsdp2_cpu_offload_policy device_mesh optimizer model_config"
    ),
    *names("verl.workers.config:HFModelConfig", "hf_config model_type"),
    # The fields that a forward pass reads and leaves.
    *names("transfer_queue:KVBatchMeta", "fields"),
    *names("verl.utils.tensordict_utils", "assign_non_tensor() get()"),
    *names("verl.workers.utils.padding", "response_from_nested"),
    # Parameters.
    *names("verl.utils.fsdp_utils", "fsdp_version() get_fsdp_full_state_dict"),
    *names(FSDP_ENGINE, "eval_mode module"),
)
