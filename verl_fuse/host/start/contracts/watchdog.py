"""Declares contracts on the processes that a weight sync waits for (watchdog.py)."""

from verl_fuse.host.upstream.targets import CHECKPOINT_MANAGER
from verl_fuse.spec.contract import Attribute, Contract, Decorator, Function

CONTRACTS: tuple[Contract, ...] = (
    Attribute(f"{CHECKPOINT_MANAGER}.actor_wg"),
    Attribute(f"{CHECKPOINT_MANAGER}.replicas"),
    Function(f"{CHECKPOINT_MANAGER}.update_weights", "async (self, global_steps=None)", "fed6138cfccb24c9"),
    Function(f"{CHECKPOINT_MANAGER}.sleep_replicas", "async (self)", "246b4181c5c8b45e"),
    Decorator("verl.checkpoint_engine.base:ColocatedCheckpointEngine", "CheckpointEngineRegistry.register('naive')"),
    Attribute("verl.single_controller.base.worker_group:WorkerGroup._workers"),
    Function("verl.single_controller.ray.base:RayWorkerGroup.workers", "property (self)"),
    Attribute("verl.workers.rollout.replica:RolloutReplica.servers"),
    Attribute("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.engine"),
    Function("vllm.v1.engine.async_llm:AsyncLLM.errored", "property (self)"),
)
