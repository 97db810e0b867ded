"""Declares contracts on the processes that a weight sync waits for (watchdog.py)."""

from verl_fuse.host.upstream.targets import CHECKPOINT_MANAGER
from verl_fuse.spec.contract import Contract, Decorator, names

CONTRACTS: tuple[Contract, ...] = (
    *names(CHECKPOINT_MANAGER, "actor_wg replicas update_weights sleep_replicas"),
    Decorator("verl.checkpoint_engine.base:ColocatedCheckpointEngine", "CheckpointEngineRegistry.register('naive')"),
    *names("verl.single_controller.base.worker_group:WorkerGroup", "_workers"),
    *names("verl.single_controller.ray.base:RayWorkerGroup", "workers()"),
    *names("verl.workers.rollout.replica:RolloutReplica", "servers"),
    *names("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer", "engine"),
    *names("vllm.v1.engine.async_llm:AsyncLLM", "errored()"),
)
