"""Keys that are never tried, with the reason: what is trained depends on them, or nothing reads them.

Invariants (tests/contracts/test_exact_settings.py): every pattern stands for a key of verl's composed configuration
and for none of the table; a twin's other name is a key of the table; what nothing reads is read nowhere in verl.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from verl_fuse.spec.composed import ACTOR, CRITIC, MODEL, REFERENCE, ROLLOUT
from verl_fuse.tune.table import BY_KEY


@dataclass(frozen=True)
class Outside:
    """Keys by patterns (`*` stands for any text) and why they are not in the table. `instead`: their twin in the table,
    with `{block}` for fsdp_config or megatron and `{name}` for the key's last part. `unread`: the expressions by which
    verl would read them, and does not."""

    patterns: tuple[str, ...]
    reason: str
    instead: str | None = None
    unread: tuple[str, ...] = ()

    def why(self, key: str) -> str:
        """Return the reason for a key, with the twins that are in the table."""
        if self.instead is None:
            return self.reason
        name = key.rpartition(".")[2]
        twins = dict.fromkeys(self.instead.format(block=block, name=name) for block in ("fsdp_config", "megatron"))
        return f"{self.reason}: {' or '.join(twin for twin in twins if twin in BY_KEY)}"


_AS_ENGINE = "verl copies it into the engine's block, whose own key is tried"
# First what has a name in the table, or none that matters; then what is trained. The first match answers.
OUTSIDE: tuple[Outside, ...] = (
    Outside(
        (f"{ACTOR}.entropy_from_*", f"{ACTOR}.entropy_checkpointing", f"{ACTOR}.pad_to_length"),
        _AS_ENGINE,
        f"{ACTOR}.{{block}}.{{name}}",
    ),
    Outside(
        (f"{ACTOR}.use_torch_compile",),
        "nothing reads it",
        f"{ACTOR}.fsdp_config.use_torch_compile",
        ("actor.use_torch_compile", "actor_config.use_torch_compile", "self.config.use_torch_compile"),
    ),
    Outside(
        (f"{ACTOR}.use_fused_kernels", f"{ACTOR}.use_remove_padding", f"{ACTOR}.megatron.use_remove_padding"),
        "verl replaces it by the model's key",
        f"{MODEL}.{{name}}",
    ),
    Outside((f"{REFERENCE}.megatron.use_remove_padding",), "verl replaces it by the model's key", f"{MODEL}.{{name}}"),
    Outside(
        (f"{CRITIC}.megatron.use_remove_padding",), "verl replaces it by the model's key", f"{CRITIC}.model.{{name}}"
    ),
    Outside(
        (f"{ACTOR}.fsdp_config.strategy", f"{REFERENCE}.fsdp_config.strategy"),
        "verl replaces it by the role's key",
        f"{ACTOR}.strategy",
    ),
    Outside((f"{CRITIC}.fsdp.strategy",), "verl replaces it by the role's key", f"{CRITIC}.strategy"),
    Outside(
        (f"{REFERENCE}.ulysses_sequence_parallel_size", f"{REFERENCE}.fsdp_config.ulysses_sequence_parallel_size"),
        "the reference takes the actor's",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    ),
    Outside(
        (f"{CRITIC}.ulysses_sequence_parallel_size",),
        "the critic's engine does not get it",
        f"{CRITIC}.fsdp.ulysses_sequence_parallel_size",
    ),
    Outside(
        (f"{ACTOR}.ppo_micro_batch_size",),
        "the old name, which verl's workers do not take",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    Outside(
        (f"{ROLLOUT}.log_prob_micro_batch_size",),
        "the old name, which verl's workers do not take",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ),
    Outside(
        (f"{REFERENCE}.log_prob_micro_batch_size",),
        "the old name, which verl's workers do not take",
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu",
    ),
    Outside(
        (
            f"{CRITIC}.use_dynamic_bsz",
            f"{CRITIC}.ppo_micro_batch_size*",
            f"{CRITIC}.forward_micro_batch_size*",
            f"{CRITIC}.ppo_max_token_len_per_gpu",
            f"{CRITIC}.forward_max_token_len_per_gpu",
        ),
        "the critic is always packed, by one key alone",
        f"{CRITIC}.ppo_infer_max_token_len_per_gpu",
        (
            "critic.use_dynamic_bsz",
            "critic_cfg.use_dynamic_bsz",
            "critic.ppo_micro_batch_size_per_gpu",
            "critic_cfg.ppo_micro_batch_size_per_gpu",
            "critic_cfg.ppo_max_token_len_per_gpu",
            "critic.ppo_max_token_len_per_gpu",
            "critic_cfg.forward_max_token_len_per_gpu",
        ),
    ),
    Outside((f"{REFERENCE}.use_torch_compile", f"{REFERENCE}.*entropy_*"), "no entropy of the reference is computed"),
    Outside(
        (
            f"{REFERENCE}.fsdp_config.*_offload",
            f"{REFERENCE}.fsdp_config.offload_policy",
            f"{REFERENCE}.megatron.optimizer_offload",
        ),
        "verl keeps a reference on FSDP on the host in any case, and a reference has no optimizer",
    ),
    Outside(
        (f"{REFERENCE}.fsdp_config.use_*", f"{REFERENCE}.megatron.override_transformer_config*"),
        "the reference has neither a gradient nor an entropy",
    ),
    Outside(
        (f"{REFERENCE}.pad_to_length",),
        _AS_ENGINE,
        f"{REFERENCE}.{{block}}.{{name}}",
    ),
    Outside(
        (f"{CRITIC}.fsdp.entropy_*", f"{CRITIC}.fsdp.use_torch_compile", f"{CRITIC}.megatron.entropy_*"),
        "a critic has no entropy",
    ),
    Outside((f"{CRITIC}.model.*fused_kernel*",), "a critic computes no log-probs"),
    Outside(
        ("*.tiled_mlp.*",),
        "nothing reads it: verl 0.9.1's engines do not pass it to the patch that would",
        unread=("model_config.tiled_mlp", "self.tiled_mlp", "config.tiled_mlp", "model.tiled_mlp"),
    ),
    Outside((f"{ROLLOUT}.pipeline_model_parallel_size",), "verl refuses more than 1 for every rollout"),
    Outside(
        (f"{ROLLOUT}.multi_stage_wake_up",),
        "nothing reads it",
        unread=("config.multi_stage_wake_up", "rollout.multi_stage_wake_up"),
    ),
    Outside(("reward_model.num_workers",), "the old name", "reward.num_workers"),
    Outside(
        (
            "*.train_batch_size",
            "*.gen_batch_size",
            "*.val_batch_size",
            "*.ppo_mini_batch_size",
            "*.ppo_epochs",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.over_sample_rate",
            "*.rollout_n",
        ),
        "the samples of a step or of an update depend on it",
    ),
    Outside(
        ("*max_prompt_length", "*max_response_length", "*.prompt_length", "*.response_length", "*.max_model_len"),
        "other samples are cut",
    ),
    Outside(
        (
            "*.temperature",
            "*.top_k",
            "*.top_p",
            "*.do_sample",
            "*.ignore_eos",
            "*.logprobs_mode",
            "*.val_kwargs.*",
            f"{ROLLOUT}.name",
            "*.multi_turn.*",
        ),
        "samples are drawn otherwise",
    ),
    Outside(("*seed", "*shuffle", "*.full_determinism"), "other random numbers are drawn"),
    Outside(("*dtype*", "*quantization*", "*qat.*"), "numbers are rounded to fewer or more bits"),
    Outside(
        (
            "*clip*",
            "*loss*",
            "*entropy_coeff",
            "*.calculate_*",
            "*.tau_*",
            "*kl_*",
            "algorithm.*",
            "distillation.*",
            f"{ACTOR}.use_prefix_grouper",
            f"{ACTOR}.freeze_vision_tower",
        ),
        "the loss, or what it is computed from, depends on it",
    ),
    Outside(("*.optim.*",), "the optimizer's steps depend on it"),
    Outside(("*lora*", "*target_modules", "*exclude_modules", "*.mtp.*"), "other parameters are trained"),
    Outside(("*router_replay*", "*routing_replay"), "experts are chosen otherwise"),
    Outside(
        (
            "data.*",
            "*.path",
            "*_path",
            "*.external_lib",
            "*.override_config*",
            "custom_reward_function.*",
            "reward_*",
            "reward.[!n]*",
            "sandbox_fusion*",
        ),
        "the model, its data or its rewards are others",
    ),
    Outside(
        ("trainer.*", "ray_kwargs.*", "global_profiler.*", "*.profiler.*", "*.checkpoint.*", "transfer_queue.*"),
        "it belongs to the run and not to how a step is computed",
    ),
)


def outside(key: str) -> str | None:
    """Return why a key is never tried; None for a key that no pattern stands for."""
    found = (entry for entry in OUTSIDE for pattern in entry.patterns if fnmatchcase(key, pattern))
    return next((entry.why(key) for entry in found), None)
