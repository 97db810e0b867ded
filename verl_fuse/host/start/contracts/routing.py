"""Declares contracts on the code that routing rests on: the load balancer we subclass, its callers, and the place where
a prompt's samples begin (routing.py, prompts.py, processes.py)."""

from verl_fuse.host.upstream.targets import LOAD_BALANCER, PPO_YAML, SYNC_TRAINER
from verl_fuse.spec.contract import Attribute, Class, ConfigKey, Contract, Function

AGENT_LOOP_WORKER = "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ"

CONTRACTS: tuple[Contract, ...] = (
    Class(LOAD_BALANCER),
    Function(
        f"{LOAD_BALANCER}.__init__",
        "(self, servers, max_cache_size=..., full_determinism=False)",
        "1a4913766fca9907",
        True,
    ),
    Function(f"{LOAD_BALANCER}.require_acquire_fields", "(self)", "9ee15ef494471d92", closed=True),
    Attribute(f"{LOAD_BALANCER}._servers"),
    Attribute(f"{LOAD_BALANCER}._inflight_requests"),
    Attribute("verl.workers.rollout.replica:RolloutReplica.server_address"),
    # One task per prompt (`_run_prompt`, under contract in transfer_queue.py), in which the tasks
    # of its samples are made.
    Function(f"{AGENT_LOOP_WORKER}.generate_sequences", "async (self, batch)", "aa1fafabeb0a5e01"),
    # The step, and whether the step validates.
    Function(
        "verl.experimental.agent_loop.agent_loop:get_trajectory_info",
        "async (step, index, validate)",
        "261c13297b79e35e",
    ),
    Attribute("verl.experimental.agent_loop:AgentLoopManager.agent_loop_workers"),
    # Deals prompts out to the workers (processes.py); where their samples are scored.
    Function(
        "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences", "(self, prompts)", "4695680745c0b34a"
    ),
    Function(f"{SYNC_TRAINER}.get_reward_handles", "(self)", "b391a8d92834a57c"),
    # The place of a checkpoint, for files kept beside it.
    Function(f"{SYNC_TRAINER}._load_checkpoint", "(self)", "7924cd3bd8d6275b"),
    ConfigKey(PPO_YAML, "trainer.resume_mode", "auto"),
    ConfigKey(PPO_YAML, "trainer.resume_from_path", object),
)
