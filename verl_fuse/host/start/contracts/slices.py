"""Declares contracts on worker groups of their own on a replica's devices, and on the models in them (slices.py,
slice_worker.py, slice_models.py, buckets.py, assembly.py)."""

from verl_fuse.host.upstream.targets import ENGINE_WORKERS, FSDP_ENGINE, RAY_WORKER_GROUPS
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Decorator, Function

BASE_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"

CONTRACTS: tuple[Contract, ...] = (
    # A world of its own on part of a pool.
    Function(f"{RAY_WORKER_GROUPS}:split_resource_pool", "(resource_pool, split_size)", "fc513bf2091c3461"),
    Class(f"{RAY_WORKER_GROUPS}:RayClassWithInitArgs", ("ClassWithInitArgs",)),
    Function(f"{RAY_WORKER_GROUPS}:RayClassWithInitArgs.__init__", "(self, cls, *args, **kwargs)", "92f682310acaa1d1"),
    Function(
        f"{RAY_WORKER_GROUPS}:RayWorkerGroup.__init__",
        "(self, resource_pool=None, ray_cls_with_init=None, bin_pack=True, name_prefix=None, detached=False, "
        "worker_names=None, worker_handles=None, ray_wait_register_center_timeout=300, **kwargs)",
        "bbb6d1495f53ced4",
    ),
    Function(
        f"{RAY_WORKER_GROUPS}:RayWorkerGroup._init_with_subresource_pool",
        "(self, resource_pool, ray_cls_with_init, bin_pack, detached, worker_env=None)",
        "bc5b45751b6ee16b",
    ),
    Function(f"{RAY_WORKER_GROUPS}:ResourcePoolManager.get_resource_pool", "(self, role)", "a2b427de130480af"),
    Attribute(f"{BASE_TRAINER}.processor"),
    Attribute(f"{BASE_TRAINER}.resource_pool_manager"),
    Attribute("verl.workers.rollout.replica:RolloutReplica.world_size"),
    Class("verl.single_controller.base.decorator:Dispatch", ("DynamicEnum",)),
    # A worker that holds models of several kinds, dispatched over a mesh of its own.
    Function(
        "verl.single_controller.base.worker:Worker.__init__",
        "(self, cuda_visible_devices=None)",
        "de6c552a45d47b38",
    ),
    Function(
        "verl.single_controller.base.worker:Worker.set_dispatch_collect",
        "(self, mesh_name, dispatch_dp_rank, collect_dp_rank)",
        "5c08660811de664b",
    ),
    Function("verl.single_controller.base.worker:Worker.get_dispatch_collect", "(self)", "00b7df58a1a92259"),
    # Memory that is given back to the device.
    Function("verl.utils.memory_utils:aggressive_empty_cache", "(force_sync=True, max_retries=3)", "7e82f9b4f07494ca"),
    # Policy and reference as verl builds them, each from its own block.
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.__init__",
        "(self, config, role, distillation_config=None, **kwargs)",
        "0234aec960486ae8",
    ),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.init_model", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    Attribute(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.ref"),
    Attribute(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.actor"),
    Attribute(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.actor_worker_cls"),
    Attribute(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.ref_worker_cls"),
    # The critic, from the settings that verl gives its workers.
    Attribute(f"{BASE_TRAINER}.resource_pool_to_cls"),
    Attribute("verl.single_controller.base.worker_group:ClassWithInitArgs.kwargs"),
    Function(f"{ENGINE_WORKERS}:TrainingWorker.reset", "(self)", "f6bc0d111a3b2c99", closed=True),
    Attribute(f"{ENGINE_WORKERS}:TrainingWorker.engine"),
    Attribute(f"{ENGINE_WORKERS}:TrainingWorker.engine_config"),
    # With LoRA the policy without adapters is the reference.
    Attribute(f"{ENGINE_WORKERS}:TrainingWorker.model_config"),
    Attribute("verl.workers.config:HFModelConfig.lora_rank"),
    Class("verl.workers.config:TrainingWorkerConfig"),
    Attribute("verl.workers.config:TrainingWorkerConfig.engine_config"),
    # Differences of a forward-only engine.
    Attribute("verl.workers.config:EngineConfig.forward_only"),
    Attribute("verl.workers.config:FSDPEngineConfig.model_dtype"),
    Function(f"{FSDP_ENGINE}._build_module", "(self)", "efe66f66243aa629"),
    Function(f"{FSDP_ENGINE}._build_model_optimizer", "(self)", "46d50ef606111101"),
    # The dtype that parameters are rounded to, and the place of a forward-only engine's shards.
    Function(f"{FSDP_ENGINE}._build_fsdp_module", "(self, module)", "5ffee7368a4f90a5"),
    Attribute(f"{FSDP_ENGINE}.engine_config"),
    Attribute("verl.workers.config:FSDPEngineConfig.mixed_precision"),
    Function("verl.utils.torch_dtypes:PrecisionType.to_dtype", "static (precision)", "321cec510e0e3fcd"),
    ConfigKey("verl/trainer/config/engine/fsdp.yaml", "forward_only", bool),
    ConfigKey("verl/trainer/config/engine/fsdp.yaml", "model_dtype", str),
    ConfigKey("verl/trainer/config/rollout/rollout.yaml", "checkpoint_engine.backend", str),
    # The part of a trained model that stays on its device, and its size.
    Function(f"{FSDP_ENGINE}.is_optimizer_offload_enabled", "property (self)"),
    Attribute(f"{FSDP_ENGINE}._uses_fsdp2_cpu_offload_policy"),
    Attribute(f"{FSDP_ENGINE}.device_mesh"),
    Attribute(f"{FSDP_ENGINE}.optimizer"),
    Attribute(f"{FSDP_ENGINE}.model_config"),
    Attribute("verl.workers.config:HFModelConfig.hf_config"),
    Attribute("verl.workers.config:HFModelConfig.model_type"),
    # The fields that a forward pass reads and leaves.
    Attribute("transfer_queue:KVBatchMeta.fields"),
    Function("verl.utils.tensordict_utils:assign_non_tensor", "(tensor_dict, **kwargs)"),
    Function("verl.utils.tensordict_utils:get", "(tensordict, key, default=None)"),
    Function("verl.workers.utils.padding:response_from_nested", "(tensor, response_mask)", "38284686ba46f31a"),
    # Parameters.
    Function("verl.utils.fsdp_utils:fsdp_version", "(model)"),
    Function(
        "verl.utils.fsdp_utils:get_fsdp_full_state_dict",
        "(model, offload_to_cpu=True, rank0_only=True)",
        "db3e931a0bbff10e",
    ),
    Function(f"{FSDP_ENGINE}.eval_mode", "(self, **kwargs)", "40eb6570fb4a74b5"),
    Attribute(f"{FSDP_ENGINE}.module"),
)
