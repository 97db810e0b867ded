"""Declares contracts on the code that routing rests on: the load balancer we subclass, its callers, and the place where
a prompt's samples begin (routing.py, prompts.py, processes.py)."""

from verl_fuse.host.upstream.targets import LOAD_BALANCER, PPO_YAML, SYNC_TRAINER
from verl_fuse.spec.contract import Attribute, Class, Contract, Function, config_keys, names

AGENT_LOOP_WORKER = "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ"

CONTRACTS: tuple[Contract, ...] = (
    Class(LOAD_BALANCER),
    Function(
        f"{LOAD_BALANCER}.__init__",
        "(self, servers, max_cache_size=..., full_determinism=False)",
        "1a4913766fca9907",
        True,
    ),
    *names(LOAD_BALANCER, "require_acquire_fields", closed=True),
    *names(LOAD_BALANCER, "_servers _inflight_requests"),
    Attribute("verl.workers.rollout.replica:RolloutReplica.server_address"),
    # One task per prompt (`_run_prompt`, under contract in transfer_queue.py), in which the tasks
    # of its samples are made.
    *names(AGENT_LOOP_WORKER, "generate_sequences"),
    # The step, and whether the step validates.
    *names("verl.experimental.agent_loop.agent_loop", "get_trajectory_info"),
    *names("verl.experimental.agent_loop:AgentLoopManager", "agent_loop_workers"),
    # Deals prompts out to the workers (processes.py); where their samples are scored.
    *names("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ", "generate_sequences"),
    *names(SYNC_TRAINER, "get_reward_handles"),
    # The place of a checkpoint, for files kept beside it.
    *names(SYNC_TRAINER, "_load_checkpoint"),
    *config_keys(PPO_YAML, "trainer.resume_mode trainer.resume_from_path:any"),
)
