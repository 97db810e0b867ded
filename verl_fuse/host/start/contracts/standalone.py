"""Declares contracts on the code that creates, feeds and destroys replicas with devices of their own (standalone/):
`RolloutReplica.init_standalone`, done in a thread."""

from verl_fuse.host.upstream.targets import (
    CHECKPOINT_ENGINES,
    FSDP_ENGINE,
    RAY_WORKER_GROUPS,
    ROLLOUT_REPLICA,
    ROLLOUT_YAML,
)
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Function

MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"

CONTRACTS: tuple[Contract, ...] = (
    # The calls that are made here in its place, and in its order.
    Function(f"{ROLLOUT_REPLICA}.init_standalone", "async (self)", "ff7fdbb0b2c2f301"),
    Function(
        f"{ROLLOUT_REPLICA}.__init__",
        "(self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False, is_teacher_model=False, "
        "name_suffix='')",
        "3edee445340871b5",
    ),
    Function(f"{ROLLOUT_REPLICA}.get_ray_class_with_init_args", "(self)", "9dff5c85c394360c"),
    Function(f"{ROLLOUT_REPLICA}.launch_servers", "async (self)"),
    Function(
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica.launch_servers",
        "async (self)",
        "21b815fc40e17522",
    ),
    Attribute(f"{ROLLOUT_REPLICA}.rollout_mode"),
    Attribute(f"{ROLLOUT_REPLICA}.resource_pool"),
    Attribute(f"{ROLLOUT_REPLICA}.workers"),
    Attribute(f"{ROLLOUT_REPLICA}.gpus_per_replica_node"),
    Attribute(f"{ROLLOUT_REPLICA}.nnodes"),
    Class("verl.workers.rollout.replica:RolloutMode", ("Enum",)),
    Attribute("verl.workers.rollout.replica:RolloutMode.STANDALONE"),
    Attribute("verl.workers.rollout.llm_server:LLMServerManager.rollout_replica_class"),
    # Placement.
    Function(
        f"{RAY_WORKER_GROUPS}:RayResourcePool.__init__",
        "(self, process_on_nodes=None, use_gpu=True, name_prefix=None, max_colocate_count=10, detached=False, "
        "accelerator_type=None)",
        "c358981a86d4c2a9",
    ),
    Function(
        f"{RAY_WORKER_GROUPS}:RayResourcePool.get_placement_groups",
        "(self, strategy='STRICT_PACK', name=None, device_name='cuda')",
        "68827864a42e8c4f",
    ),
    Attribute(f"{RAY_WORKER_GROUPS}:RayResourcePool.pgs"),
    Function(f"{RAY_WORKER_GROUPS}:sort_placement_group_by_node_ip", "(pgs)", "fcf846cc9c478762"),
    Function(
        f"{RAY_WORKER_GROUPS}:RayWorkerGroup._init_with_resource_pool",
        "(self, resource_pool, ray_cls_with_init, bin_pack, detached, worker_env=None)",
        "6a4dc684e958e2f9",
    ),
    Function("verl.plugin.platform:get_platform", "()"),
    Function("verl.utils.device:get_device_name", "()"),
    Function("verl.utils.device:get_device_id", "()"),
    # Weights: the engine's export is offered to the worker beside the replica's engine.
    Function(
        f"{FSDP_ENGINE}.get_per_tensor_param",
        "(self, layered_summon=False, base_sync_done=False, **kwargs)",
    ),
    Function(f"{MEGATRON_ENGINE}.get_per_tensor_param", "(self, base_sync_done=False, **kwargs)"),
    Function(f"{FSDP_ENGINE}.is_param_offload_enabled", "property (self)"),
    Function(f"{FSDP_ENGINE}.to", "(self, device, model=True, optimizer=True, grad=True)", "c9359fd3e8ddff11"),
    Function(
        f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker.__init__",
        "(self, rollout_config, model_config, server_adapter=None, *args, **kwargs)",
    ),
    Function(
        f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker.update_weights",
        "async (self, global_steps=None)",
        "86b4cbbf43b032a9",
    ),
    Attribute(f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker.checkpoint_engine"),
    Function(
        f"{CHECKPOINT_ENGINES}:ColocatedCheckpointEngine.send_weights",
        "(self, weights, global_steps=None)",
        "d69a6bde5a64f5e8",
    ),
    Function(
        f"{CHECKPOINT_ENGINES}:ColocatedCheckpointEngine.receive_weights",
        "(self, global_steps=None)",
        "72ce73c9d852b22e",
    ),
    Function(
        "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights",
        "async (self, weights, global_steps=None, wire_format='named_tensors', **kwargs)",
    ),
    ConfigKey(ROLLOUT_YAML, "checkpoint_engine.backend", "naive"),
)
