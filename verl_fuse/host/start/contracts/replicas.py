"""Declares contracts on the engines that carry weights to replicas (verl_fuse_realloc/sync/checkpoint_engine.py), the
processes that a weight sync waits for, and parts of torch."""

from verl_fuse.host.upstream import targets as t
from verl_fuse.spec.contract import Class, Contract, Decorator, names

ENGINE = f"{t.CHECKPOINT_ENGINES}:CheckpointEngine"
METHODS = "prepare build_topology init_process_group finalize send_weights receive_weights"

CONTRACTS: tuple[Contract, ...] = (
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
