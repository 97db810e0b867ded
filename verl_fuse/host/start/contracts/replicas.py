"""Declares contracts on replicas with devices of their own (standalone/), the engines that carry weights to them
(verl_fuse_realloc/sync/checkpoint_engine.py), the processes that a weight sync waits for, and parts of torch."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, config, names

ENGINE = f"{t.CHECKPOINT_ENGINES}:CheckpointEngine"
METHODS = "prepare build_topology init_process_group finalize send_weights receive_weights"

CONTRACTS: tuple[Contract, ...] = (
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
    # Our engine is handed the training engine in place of its whole parameters.
    Class(ENGINE, ("ABC",), abstract=tuple(METHODS.split())),
    *names(f"{ENGINE}.{METHODS.replace(' ', ' .')}", closed=True),
    *names(f"{t.WORKER}.checkpoint_engine verl.utils.device:get_torch_device :get_device_name"),
    *names(f"{t.CHECKPOINT_ENGINES}:CheckpointEngineWorker.__init__ :CheckpointEngineManager.build_process_group"),
    *names(f"{t.CHECKPOINT_ENGINES}:CheckpointEngineRegistry.register"),
    # The processes that a weight sync waits for.
    *names("vllm.v1.engine.async_llm:AsyncLLM.errored() verl.single_controller.base.worker_group:WorkerGroup._workers"),
    *names(f"{t.ROLLOUT_REPLICA}.servers {t.CHECKPOINT_MANAGER}.replicas .sleep_replicas .actor_wg .update_weights"),
    *names(f"{t.RAY_WORKER_GROUPS}:RayWorkerGroup.workers() {t.VLLM_SERVER}.engine"),
    Decorator(f"{t.CHECKPOINT_ENGINES}:ColocatedCheckpointEngine", "CheckpointEngineRegistry.register('naive')"),
    # The store of the default process group, a shard's place in its tensor, tensors made of tensors (runtime/meter.py).
    *names("torch.distributed.distributed_c10d:_get_default_store"),
    *names("torch.distributed.tensor._utils:compute_local_shape_and_global_offset"),
    *names("torch.utils._python_dispatch:is_traceable_wrapper_subclass"),
)
