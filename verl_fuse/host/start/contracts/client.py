"""Declares contracts on the rollout client we subclass, and on the answers that our client puts together (client.py,
resume.py)."""

from verl_fuse.spec.contract import Class, Contract, Registration, names

SERVER_CLIENT = "verl.workers.rollout.llm_server:LLMServerClient"
ROLLOUT_REPLICAS = "verl.workers.rollout.replica"

CONTRACTS: tuple[Contract, ...] = (
    Class(SERVER_CLIENT),
    *names(SERVER_CLIENT, "__init__ _acquire_server generate config _load_balancer"),
    *names("verl.utils", "normalize_token_ids()"),
    Class(f"{ROLLOUT_REPLICAS}:TokenOutput", ("BaseModel",), required=("token_ids",)),
    *names(
        f"{ROLLOUT_REPLICAS}:TokenOutput", "token_ids log_probs routed_experts stop_reason num_preempted extra_fields"
    ),
    Registration("verl.workers.rollout.replica", 'RolloutReplicaRegistry.register("vllm", _load_vllm)'),
    Registration("verl.workers.rollout.replica", 'RolloutReplicaRegistry.register("sglang", _load_sglang)'),
)
