"""The switches whose pairs are tested: features of verl-fuse, settings of verl's engines, algorithms and limits.

The first value of a factor is what a row has where nothing else is asked for. A value is settings of the recipe ppo-cpu
(`key: value`), or what the row's run does otherwise (`sampling`, `recovery`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covering import covering_rows

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LONG_LIMIT = 16384
PACKED_TOKENS = 1024


@dataclass(frozen=True)
class Value:
    """One value of a factor: the settings it makes, and the sampling parameters its requests have
    besides those of the recipe."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


# By factor and value; a row has one value of each factor.
Factors = Mapping[str, Mapping[str, Value]]
Row = Mapping[str, str]

GRPO = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False}
# Nobody sets up a reference that is not there.
NO_REFERENCE = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": None}
STREAM = {"fuse.interstage.enabled": True}
SLICES = {**STREAM, "fuse.interstage.layout": "slices"}
ELASTIC = {"fuse.elastic.enabled": True}
THRESHOLD = 8

FACTORS: Factors = {
    "algorithm": {
        "ppo": Value(),
        "ppo-kl": Value({"algorithm.use_kl_in_reward": False, **NO_REFERENCE}),
        "grpo": Value({**GRPO, **NO_REFERENCE}),
        "grpo+kl": Value({**GRPO, f"{ACTOR}.use_kl_loss": True}),
        "dapo": Value(
            {
                **GRPO,
                **NO_REFERENCE,
                "algorithm.filter_groups.enable": True,
                f"{ACTOR}.clip_ratio_high": 0.28,
                f"{ACTOR}.loss_agg_mode": "token-mean",
            }
        ),
    },
    "interstage": {
        "off": Value(),
        "shared": Value(STREAM),
        "shared+tail": Value({**STREAM, "fuse.interstage.migration_threshold": 0.34}),
        "slices": Value(SLICES),
        "slices+tail": Value({**SLICES, "fuse.interstage.migration_threshold": THRESHOLD}),
        "slices+auto": Value({**SLICES, "fuse.interstage.migration_threshold": "auto"}),
    },
    "elastic": {
        "off": Value(),
        "on": Value(ELASTIC),
        "scale": Value({**ELASTIC, "fuse.elastic.scale": True}),
        "cut": Value({**ELASTIC, "fuse.elastic.release": True, "fuse.elastic.cut_fraction": 0.7}),
    },
    "sync": {
        "stock": Value(),
        "shards": Value({"fuse.realloc.weight_sync": "shards", "fuse.realloc.checksums": True}),
    },
    "speculation": {"off": Value(), "on": Value({"fuse.speculation.enabled": True, "fuse.speculation.tokens": 4})},
    "precision": {
        "fp32": Value(),
        "reference bf16": Value({"actor_rollout_ref.ref.fsdp_config.model_dtype": "bf16"}),
        "bf16": Value({"precision.param_dtype": "bf16"}),
    },
    "attention": {
        "sdpa": Value(),
        "eager": Value(
            {
                f"{MODEL}.override_config.attn_implementation": "eager",
                "critic.model.override_config.attn_implementation": "eager",
            }
        ),
    },
    "batches": {
        "padded": Value(),
        "packed": Value(
            {
                f"{MODEL}.use_remove_padding": True,
                "critic.model.use_remove_padding": True,
                **{
                    f"{engine}use_dynamic_bsz": True
                    for engine in (f"{ACTOR}.", f"{ROLLOUT}.log_prob_", "actor_rollout_ref.ref.log_prob_", "critic.")
                },
                f"{ACTOR}.ppo_max_token_len_per_gpu": PACKED_TOKENS,
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu": PACKED_TOKENS,
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": PACKED_TOKENS,
                "critic.ppo_infer_max_token_len_per_gpu": PACKED_TOKENS,
            }
        ),
    },
    "engine": {
        "plain": Value(),
        "offload": Value(
            {
                f"{block}.{part}": True
                for block in (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
                for part in ("param_offload", "optimizer_offload")
            }
        ),
        "fused kernels": Value({f"{MODEL}.use_fused_kernels": True}),
        "lora": Value({f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 16, f"{ROLLOUT}.load_format": "safetensors"}),
    },
    "limit": {
        "near": Value(),
        "far": Value({"data.max_response_length": LONG_LIMIT, f"{ROLLOUT}.max_model_len": LONG_LIMIT + 16}),
    },
    "seats": {"many": Value(), "few": Value({f"{ROLLOUT}.max_num_seqs": 4})},
    "sampling": {
        "plain": Value(),
        "stop": Value(sampling={"stop": ["none of the task's responses"]}),
        "penalty": Value(sampling={"presence_penalty": 0.5}),
    },
    "agent": {
        "single turn": Value(),
        "tools": Value(
            {
                f"{ROLLOUT}.agent.default_agent_loop": "pair_tools",
                f"{ROLLOUT}.multi_turn.enable": True,
                f"{ROLLOUT}.multi_turn.format": "hermes",
                f"{ROLLOUT}.multi_turn.function_tool_path": "${task_dir}/tools.py",
            }
        ),
    },
    "correction": {
        "none": Value(),
        "bypass": Value({"algorithm.rollout_correction.bypass_mode": True}),
        "weights": Value({"algorithm.rollout_correction.rollout_is": "token"}),
    },
    "update": {"whole": Value(), "lean": Value({"fuse.update.skip_zero_gradient": True})},
    "samples": {"4": Value(), "2": Value({f"{ROLLOUT}.n": 2})},
    "recovery": {"none": Value(), "resumed": Value({"trainer.save_freq": 1, "trainer.resume_mode": "auto"})},
    "placement": {
        "none": Value(),
        "deferred": Value({"fuse.placement.critic": {"first": 1, "devices": 1}, "fuse.placement.defer": True}),
    },
    "critic": {
        "last": Value(),
        # One mini-batch, of which the actor has as many rows.
        "first": Value(
            {
                "fuse.update.skip_values": True,
                "critic.ppo_mini_batch_size": "${data.train_batch_size}",
                f"{ACTOR}.ppo_mini_batch_size": "${data.train_batch_size}",
            }
        ),
    },
    "logits": {"all": Value(), "responses": Value({"fuse.update.response_logits": True})},
    "ranks": {"as they come": Value(), "balanced": Value({"fuse.update.balance": True})},
    "prompts": {"each": Value(), "once": Value({"fuse.update.share_prompts": True})},
}
# Factors that joined the table after rows had run, by the time at which they did: the rows of all factors before them
# stay, with their results, and further rows cover these.
JOINED = (("placement", "critic"), ("logits",), ("ranks",), ("prompts",))
LATER = tuple(name for group in JOINED for name in group)

# A factor that left the table after rows had run, behind the one named, and what was refused beside its second value:
# rows that had its first one stay, with their results.
LEFT = ("layout", ("fixed", "changed"), "speculation", (("engine", "lora"), ("placement", "deferred")))

# Two factors' values that a run refuses together before it starts, and the key that its message names.
REFUSED: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...], str], ...] = (
    (
        "interstage",
        ("shared+tail", "slices+tail", "slices+auto"),
        "elastic",
        ("scale", "cut"),
        "fuse.interstage.migration_threshold",
    ),
    # verl asks the critic for values without adapters.
    ("algorithm", ("ppo",), "engine", ("lora",), f"{MODEL}.lora_rank"),
    ("sync", ("shards",), "engine", ("lora",), f"{MODEL}.lora_rank"),
    ("algorithm", ("grpo+kl",), "update", ("lean",), f"{ACTOR}.use_kl_loss"),
    # A critic is placed, where there is one and it stays there.
    ("algorithm", ("grpo", "grpo+kl", "dapo"), "placement", ("deferred",), "algorithm.adv_estimator"),
    ("algorithm", ("grpo", "grpo+kl", "dapo"), "critic", ("first",), "algorithm.adv_estimator"),
    ("placement", ("deferred",), "critic", ("first",), "fuse.placement.critic"),
    ("engine", ("fused kernels",), "logits", ("responses",), f"{MODEL}.use_fused_kernels"),
    ("engine", ("fused kernels",), "prompts", ("once",), f"{MODEL}.use_fused_kernels"),
)

NAMES = {name: list(values) for name, values in FACTORS.items()}

# Factors that are features of verl-fuse, or of the test: stock verl runs at their first value.
FEATURES = (
    "interstage",
    "elastic",
    "sync",
    "speculation",
    "update",
    "recovery",
    "placement",
    "critic",
    "logits",
    "ranks",
    "prompts",
)

# What rows that `make test` runs have: pairs that went wrong once, each with what would hide it at its first value.
ALWAYS: tuple[Row, ...] = (
    {"algorithm": "ppo", "interstage": "slices", "precision": "reference bf16", "recovery": "none"},
    {
        "interstage": "slices+tail",
        "sampling": "stop",
        "seats": "many",
        "correction": "none",
        "precision": "fp32",
        "recovery": "none",
    },
    {
        "algorithm": "grpo",
        "interstage": "slices",
        "update": "lean",
        "correction": "none",
        "precision": "fp32",
        "recovery": "none",
    },
    {
        "interstage": "slices+tail",
        "limit": "far",
        "seats": "many",
        "sampling": "plain",
        "correction": "none",
        "precision": "fp32",
        "recovery": "none",
    },
    {"algorithm": "dapo", "interstage": "shared", "elastic": "scale", "recovery": "none"},
    {"interstage": "slices+auto", "sync": "shards", "precision": "bf16", "recovery": "none"},
)

# Everything that verl-fuse does in a step of PPO at once: the largest combination that is accepted.
EVERYTHING: Row = {
    **{name: next(iter(values)) for name, values in FACTORS.items()},
    "interstage": "slices+tail",
    "elastic": "on",
    "sync": "shards",
    "batches": "packed",
    "critic": "first",
    "logits": "responses",
    "ranks": "balanced",
    "prompts": "once",
}

# Values that are in no row, and why: what stock verl 0.9.1 cannot run without an accelerator, and other engines.
EXCLUDED = {
    "strategy=fsdp (FSDP1)": "updates on it: test_lean_engines.py, test_own_values.py; a whole run: test_lean_run.py",
    "ulysses_sequence_parallel_size=2": "verl patches flash attention alone: with sdpa each rank "
    "would attend to its part only",
    "attn_implementation=flash_attention_2": "needs a GPU; the cpu platform refuses it before start",
    "rollout sleep mode, free_cache_engine": "vLLM cannot sleep on a CPU; the cpu platform refuses both before start",
    # pair_recorder.py makes verl's update before ours; stream_recorder.py after it.
    "fuse.update.stream": "verl's update comes first here, which gradients that wait forbid: test_stream_run.py does "
    "otherwise",
    "model_type=mistral, gemma, qwen3, qwen3_moe": "a whole run of each, several features at once: test_family_runs.py",
    # test_pipeline_run.py and test_megatron_slices_run.py are runs of its own.
    "strategy=megatron": "its engines compute in bfloat16 alone, which these bounds do not fit: "
    "test_megatron_slices_run.py, test_pipeline_run.py",
}


def default_row(factors: Factors = FACTORS) -> dict[str, str]:
    return {name: next(iter(values)) for name, values in factors.items()}


def rows() -> list[dict[str, str]]:
    """The rows of the table: those that `make test` runs, then those that cover most; then those of the factors that
    joined later."""
    left, values, behind, beside = LEFT
    names = {key: of for name in NAMES for key, of in ((name, NAMES[name]), *([(left, [*values])] * (name == behind)))}
    plain = {name: of[0] for name, of in names.items()}
    refused = {**refused_pairs(), **{((left, values[1]), other): left for other in beside}}
    there = [name for name in names if name not in LATER]
    table = covering_rows({name: names[name] for name in there}, refused, ALWAYS)
    for group in JOINED:
        known = [{**row, **{name: plain[name] for name in group}} for row in table]
        # Every other factor is at its first value: a row with all factors at others is too long to read.
        halves = [{name: plain[name] for name in part} for part in (there[::2], there[1::2])]
        begun = [{**half, name: value} for name in group for value in names[name][1:] for half in halves]
        there += group
        table = covering_rows({name: names[name] for name in there}, refused, [*known, *begun])
    return [{name: value for name, value in row.items() if name != left} for row in table]


def stock_row(row: Row) -> dict[str, str]:
    """The row's setting without verl-fuse."""
    plain = default_row()
    return {name: plain[name] if name in FEATURES else value for name, value in row.items()}


def refused_pairs() -> dict[tuple[tuple[str, str], tuple[str, str]], str]:
    """By pair, in the order of the factors, the key that its refusal names."""
    return {((one, a), (other, b)): key for one, first, other, second, key in REFUSED for a in first for b in second}


def described(row: Row, factors: Factors = FACTORS) -> str:
    """The values of a row that are not their factor's first."""
    plain = default_row(factors)
    return ", ".join(f"{name}={value}" for name, value in row.items() if value != plain[name]) or "all at their first"


def settings_of(row: Row, factors: Factors = FACTORS) -> dict[str, Any]:
    return {key: value for name, chosen in row.items() for key, value in factors[name][chosen].settings.items()}


def sampling_of(row: Row, factors: Factors = FACTORS) -> dict[str, Any]:
    return {key: value for name, chosen in row.items() for key, value in factors[name][chosen].sampling.items()}
