"""Measure generation and inference of a heavy-tailed step: stock verl, fused inference without overlap (control), and
fused with migration and slices.

The bench is one run of the recipe ppo-cpu with real vLLM on two replicas; replica, slice and training rank of the same
number are pinned to one core. The steps of a group generate the same lengths, one arm each, in random order; the first
group warms up. Seconds are from a step's begin to its advantages, the weight refresh of the slices included. A ratio is
of sums over all groups, its interval a bootstrap over groups (95 %).

    python -m ci.bench.interstage [--groups 15] [--keep DIRECTORY]
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ci.bench.support.runs import SEED, command_line, launch, packed, ratio_of_arms

ARMS = ("stock", "control", "fused")
PROMPTS, SAMPLES_PER_PROMPT = 12, 4
SAMPLES = PROMPTS * SAMPLES_PER_PROMPT
# Response tokens are the quantiles of a lognormal distribution, cut at both ends, in a random order for each group.
MEDIAN, SIGMA, SHORTEST, LONGEST = 40, 1.3, 8, 500
THRESHOLD = 0.25
# No prompt of the task is longer.
PROMPT = 16
HIDDEN, LAYERS = 256, 6


def make_plan(groups: int, measurements: Path) -> dict[str, Any]:
    """Return the plan that arms/bench_plan.py reads."""
    rng = np.random.default_rng(SEED)
    quantiles = [NormalDist().inv_cdf((sample + 0.5) / SAMPLES) for sample in range(SAMPLES)]
    lengths = np.clip(MEDIAN * np.exp(SIGMA * np.array(quantiles)), SHORTEST, LONGEST).astype(int)
    arms = [str(arm) for _ in range(groups) for arm in rng.permutation(ARMS)]
    return {
        "arms": arms,
        "arms_per_group": len(ARMS),
        "lengths": [rng.permutation(lengths).tolist() for _ in range(groups)],
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "measurements": str(measurements),
    }


def make_task(folder: Path, hidden: int = HIDDEN, layers: int = LAYERS, prompts: int = PROMPTS) -> None:
    """Make a random model, by default a model whose inference takes about half as long as generation, and as many
    problems as a step has prompts."""
    import pandas
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from verl_fuse_cpu.task.euclid import all_pairs
    from verl_fuse_cpu.task.make import row
    from verl_fuse_cpu.task.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    problems = [row(pair, "train", index) for index, pair in enumerate(all_pairs(60)[:prompts])]
    for name in ("train", "validation"):
        pandas.DataFrame(problems).to_parquet(folder / f"{name}.parquet")


def overrides(folder: Path, steps: int, prompts: int = PROMPTS) -> list[str]:
    tokens = 1024
    return [
        f"task_dir={folder}",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "data.shuffle=false",
        f"data.max_response_length={LONGEST}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        f"actor_rollout_ref.rollout.max_model_len={LONGEST + PROMPT}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=heavy_tail",
        # Stock verl is fastest without padding on such lengths.
        *packed(tokens),
        "actor_rollout_ref.actor.optim.lr=1e-6",
        # The actor is never trained, to save time; its weights are still synced and refreshed.
        f"trainer.critic_warmup={steps + 1}",
        "fuse.interstage.enabled=true",
        "fuse.interstage.layout=slices",
        f"fuse.interstage.migration_threshold={THRESHOLD}",
        "fuse.observe.progress=false",
        "fuse.observe.perfetto=false",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def run(folder: Path, groups: int) -> list[dict[str, Any]]:
    """Return the measurements of every step after the first group."""
    make_task(folder)
    plan = make_plan(groups + 1, folder / "measurements.jsonl")
    (folder / "plan.json").write_text(json.dumps(plan))
    launch(folder, "interstage_arms", overrides(folder, len(plan["arms"])), folder / "run.log")
    records = [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]
    return records[len(ARMS) :]


def report(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the benchmark's JSON line."""

    def total(arm: str, part: str) -> float:
        return sum(record[part] for record in records if record["arm"] == arm)

    generation, inference = total("stock", "generation"), total("stock", "inference")
    found, interval = ratio_of_arms(records, "stock", "fused")
    control, control_interval = ratio_of_arms(records, "stock", "control")
    return {
        "bench": "interstage",
        "groups": len(records) // len(ARMS),
        **{f"{arm}_seconds": round(total(arm, "seconds"), 2) for arm in ARMS},
        "ratio": found,
        "ratio_interval": interval,
        "control_ratio": control,
        "control_ratio_interval": control_interval,
        "ceiling": round((generation + inference) / generation, 3),
        "inference_over_generation": round(inference / generation, 3),
        "parts": {
            arm: {part: round(total(arm, part), 2) for part in ("refresh", "generation", "inference")} for arm in ARMS
        },
        "samples": int(sum(record["samples"] for record in records)),
        "lost": int(sum(record["lost"] for record in records)),
        # The accounting of a step refuses a batch in which a sample appears twice; the run would have ended.
        "duplicated": 0,
        "wrong_lengths": sum(not record["whole"] for record in records),
    }


if __name__ == "__main__":
    command_line(__doc__, 15, run, report)
