"""Declares contracts: the configuration of verl under which prompts may not be routed by assignment (refusals.py), the
engine's account of its prefix cache, and replicas with devices of their own (standalone/)."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, config, names

CONTRACTS: tuple[Contract, ...] = (
    *config(f"{t.ROLLOUT_YAML} router_config_path free_cache_engine"),
    *names("vllm.outputs:RequestOutput.num_cached_tokens"),
    # The calls of `RolloutReplica.init_standalone`, made in its place and in its order, in a thread; placement; the
    # engine's export of weights, which is offered to the worker beside the replica's engine.
    *names(f"verl.plugin.platform:get_platform() {t.FSDP_ENGINE}.get_per_tensor_param() .is_param_offload_enabled()"),
    *names(f"{t.FSDP_ENGINE}.to {t.ROLLOUT_REPLICA}.init_standalone .__init__ .get_ray_class_with_init_args"),
    *names(f"{t.ROLLOUT_REPLICA}.launch_servers() .rollout_mode .resource_pool .workers .gpus_per_replica_node"),
    *names(f"{t.ROLLOUT_REPLICA}.nnodes verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights()"),
    *names("verl.workers.rollout.llm_server:LLMServerManager.rollout_replica_class"),
    *names(f"{t.RAY_WORKER_GROUPS}:sort_placement_group_by_node_ip :RayResourcePool.__init__ .get_placement_groups"),
    *names(f"{t.RAY_WORKER_GROUPS}:RayResourcePool.pgs :RayWorkerGroup._init_with_resource_pool"),
    *names(f"{t.CHECKPOINT_ENGINES}:ColocatedCheckpointEngine.send_weights .receive_weights"),
    *names(f"{t.CHECKPOINT_ENGINES}:CheckpointEngineWorker.update_weights .checkpoint_engine"),
    *names(f"{t.VLLM_REPLICA}.launch_servers {t.ROLLOUT_REPLICAS}:RolloutMode.STANDALONE"),
    *names(f"verl.utils.device:get_device_id() {t.MEGATRON_ENGINES}:MegatronEngine.get_per_tensor_param()"),
    Class(f"{t.ROLLOUT_REPLICAS}:RolloutMode", ("Enum",)),
    *config(f"{t.ROLLOUT_YAML} checkpoint_engine.backend"),
)
