"""Declares contracts on the code that creates, feeds and destroys replicas with devices of their own (standalone/):
`RolloutReplica.init_standalone`, done in a thread."""

from verl_fuse.host.upstream.targets import (
    CHECKPOINT_ENGINES,
    FSDP_ENGINE,
    RAY_WORKER_GROUPS,
    ROLLOUT_REPLICA,
    ROLLOUT_YAML,
)
from verl_fuse.spec.contract import Class, Contract, config_keys, names

MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"

CONTRACTS: tuple[Contract, ...] = (
    # The calls that are made here in its place, and in its order.
    *names(
        ROLLOUT_REPLICA,
        "init_standalone __init__ get_ray_class_with_init_args launch_servers() rollout_mode resource_pool workers "
        "gpus_per_replica_node nnodes",
    ),
    *names("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica", "launch_servers"),
    Class("verl.workers.rollout.replica:RolloutMode", ("Enum",)),
    *names("verl.workers.rollout.replica:RolloutMode", "STANDALONE"),
    *names("verl.workers.rollout.llm_server:LLMServerManager", "rollout_replica_class"),
    # Placement.
    *names(f"{RAY_WORKER_GROUPS}:RayResourcePool", "__init__ get_placement_groups pgs"),
    *names(RAY_WORKER_GROUPS, "sort_placement_group_by_node_ip"),
    *names(f"{RAY_WORKER_GROUPS}:RayWorkerGroup", "_init_with_resource_pool"),
    *names("verl.plugin.platform", "get_platform()"),
    *names("verl.utils.device", "get_device_name() get_device_id()"),
    # Weights: the engine's export is offered to the worker beside the replica's engine.
    *names(FSDP_ENGINE, "get_per_tensor_param() is_param_offload_enabled() to"),
    *names(MEGATRON_ENGINE, "get_per_tensor_param()"),
    *names(f"{CHECKPOINT_ENGINES}:CheckpointEngineWorker", "__init__() update_weights checkpoint_engine"),
    *names(f"{CHECKPOINT_ENGINES}:ColocatedCheckpointEngine", "send_weights receive_weights"),
    *names("verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter", "update_weights()"),
    *config_keys(ROLLOUT_YAML, "checkpoint_engine.backend"),
)
