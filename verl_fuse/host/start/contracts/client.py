"""Declares contracts on the rollout client we subclass, and on the answers that our client puts together (client.py,
resume.py)."""

from verl_fuse.spec.contract import Attribute, Class, Contract, Function, Registration

SERVER_CLIENT = "verl.workers.rollout.llm_server:LLMServerClient"
ROLLOUT_REPLICAS = "verl.workers.rollout.replica"

CONTRACTS: tuple[Contract, ...] = (
    Class(SERVER_CLIENT),
    Function(f"{SERVER_CLIENT}.__init__", "(self, config, load_balancer_handle=None, **kwargs)", "6110f3b5533d5767"),
    Function(f"{SERVER_CLIENT}._acquire_server", "async (self, request_id, **extra)", "6e82070651cd295b"),
    Function(
        f"{SERVER_CLIENT}.generate",
        "async (self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
        "mm_processor_kwargs=None, **kwargs)",
        "5dbce4945e072869",
    ),
    Attribute(f"{SERVER_CLIENT}.config"),
    Attribute(f"{SERVER_CLIENT}._load_balancer"),
    Function("verl.utils:normalize_token_ids", "(tokenized_output)"),
    Class(f"{ROLLOUT_REPLICAS}:TokenOutput", ("BaseModel",), required=("token_ids",)),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.token_ids"),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.log_probs"),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.routed_experts"),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.stop_reason"),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.num_preempted"),
    Attribute(f"{ROLLOUT_REPLICAS}:TokenOutput.extra_fields"),
    Registration("verl.workers.rollout.replica", 'RolloutReplicaRegistry.register("vllm", _load_vllm)'),
    Registration("verl.workers.rollout.replica", 'RolloutReplicaRegistry.register("sglang", _load_sglang)'),
)
