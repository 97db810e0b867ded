"""A composed configuration of eight devices, with the keys that exact settings depend on."""

from copy import deepcopy
from typing import Any

ACTOR, REFERENCE, ROLLOUT, MODEL = (f"actor_rollout_ref.{block}" for block in ("actor", "ref", "rollout", "model"))
_ENGINE = {
    "fsdp_size": -1,
    "ulysses_sequence_parallel_size": 1,
    "offload_policy": False,
    "param_offload": False,
    "optimizer_offload": False,
}
_LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "override_transformer_config": {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
    },
}
_MODEL = {"use_remove_padding": True, "use_fused_kernels": False, "lora_rank": 0, "enable_gradient_checkpointing": True}
_RUN: dict[str, Any] = {
    "trainer": {"nnodes": 2, "n_gpus_per_node": 4, "device": "cuda"},
    "data": {"train_batch_size": 32, "max_prompt_length": 100, "max_response_length": 401},
    "algorithm": {"adv_estimator": "grpo", "gamma": 1.0},
    "distillation": {"enabled": False},
    "reward": {"num_workers": 8},
    "reward_model": {"num_workers": None},
    "actor_rollout_ref": {
        "model": _MODEL,
        "actor": {
            "strategy": "fsdp2",
            "ppo_mini_batch_size": 16,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 16384,
            "ppo_micro_batch_size_per_gpu": None,
            "ulysses_sequence_parallel_size": 1,
            "calculate_sum_pi_squared": False,
            "use_kl_loss": False,
            "fsdp_config": _ENGINE,
            "megatron": _LAYOUT,
        },
        "ref": {
            "strategy": "fsdp2",
            "ulysses_sequence_parallel_size": 1,
            "fsdp_config": _ENGINE,
            "log_prob_use_dynamic_bsz": True,
            "log_prob_max_token_len_per_gpu": 16384,
            "megatron": _LAYOUT,
        },
        "rollout": {
            "name": "vllm",
            "n": 4,
            "tensor_model_parallel_size": 2,
            "data_parallel_size": 1,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "enforce_eager": False,
            "load_format": "dummy",
            "log_prob_use_dynamic_bsz": True,
            "log_prob_max_token_len_per_gpu": 16384,
            "log_prob_micro_batch_size_per_gpu": None,
            "engine_kwargs": {"vllm": {}},
        },
    },
    "critic": {
        "enable": None,
        "strategy": "fsdp",
        "ppo_mini_batch_size": 16,
        "use_dynamic_bsz": False,
        "ulysses_sequence_parallel_size": 1,
        "fsdp": _ENGINE,
        "megatron": _LAYOUT,
        "model": _MODEL,
    },
}


def run(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """GRPO on FSDP2, packed, without a reference: 32 prompts of 4 samples, two mini-batches; changed by dotted keys."""
    config = deepcopy(_RUN)
    for key, value in (changes or {}).items():
        *path, name = key.split(".")
        block = config
        for part in path:
            block = block.setdefault(part, {})
        block[name] = value
    return config
