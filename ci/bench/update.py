"""Measure whole GRPO steps with the actor trained: stock verl, each switch of `fuse.update` alone, and both with
metrics of the computed samples.

One run of real verl with two FSDP2 ranks and two vLLM replicas; replica and rank of the same number are pinned to one
core. In two groups of five all rewards are equal, in the others they are not, and lengths are like a trained model's:
both are forced. The steps of a group generate the same lengths, one arm each, in random order; the first group warms
up, and a step of it is updated twice, by verl and by `all`, from the same weights. All arms look at the rollout as
often. A ratio is of sums over all groups, its interval a bootstrap over groups (95 %).

    python -m ci.bench.update [--groups 8] [--keep DIRECTORY]
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ci.bench import interstage
from ci.bench.support.runs import SEED, command_line, launch, ratio_of_arms

ARMS = ("stock", "skip_zero_gradient", "skip_old_log_prob", "all")
PROMPTS, SAMPLES_PER_PROMPT, EQUAL = 10, 8, 4
SAMPLES = PROMPTS * SAMPLES_PER_PROMPT
# Response tokens: the quantiles of a lognormal distribution, cut at both ends, in a random order for each group.
MEDIAN, SIGMA, SHORTEST, LONGEST = 40, 0.7, 8, 160
# Large enough for update and old log-probs to be more than a third of a step.
HIDDEN, LAYERS = 384, 6
TOKENS = 1024


def make_plan(groups: int, measurements: Path) -> dict[str, Any]:
    """See arms/bench_plan.py; `equal`: the prompts of each group of steps whose samples get equal rewards."""
    rng = np.random.default_rng(SEED)
    quantiles = [NormalDist().inv_cdf((sample + 0.5) / SAMPLES) for sample in range(SAMPLES)]
    lengths = np.clip(MEDIAN * np.exp(SIGMA * np.array(quantiles)), SHORTEST, LONGEST).astype(int)
    return {
        "arms": [str(arm) for _ in range(groups) for arm in rng.permutation(ARMS)],
        "arms_per_group": len(ARMS),
        "lengths": [rng.permutation(lengths).tolist() for _ in range(groups)],
        "equal": [rng.permutation(PROMPTS)[:EQUAL].tolist() for _ in range(groups)],
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "measurements": str(measurements),
    }


def overrides(folder: Path, steps: int) -> list[str]:
    """Return the settings of the bench `interstage`, for GRPO with the actor trained."""
    replaced = ("fuse.interstage.", "trainer.critic_warmup=", "data.max_response_length=", "critic.")
    common = [entry for entry in interstage.overrides(folder, steps, PROMPTS) if not entry.startswith(replaced)]
    return [
        *common,
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.max_response_length={LONGEST}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_reward",
        "fuse.update.skip_zero_gradient=true",
        "fuse.update.skip_old_log_prob=true",
        "fuse.update.metrics=computed",
    ]


def run(folder: Path, groups: int) -> list[dict[str, Any]]:
    """Return the measurements of every step."""
    interstage.make_task(folder, HIDDEN, LAYERS, PROMPTS)
    plan = make_plan(groups + 1, folder / "measurements.jsonl")
    (folder / "plan.json").write_text(json.dumps(plan))
    launch(folder, "update_arms", overrides(folder, len(plan["arms"])), folder / "run.log")
    return [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]


def report(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the benchmark's JSON line."""
    measured = records[len(ARMS) :]

    def total(arm: str, part: str) -> float:
        return sum(record[part] for record in measured if record["arm"] == arm)

    ratios = {arm: ratio_of_arms(measured, "stock", arm) for arm in ARMS[1:]}
    groups = len(measured) // len(ARMS)
    kept = 1 - total("all", "skipped_tokens") / groups
    return {
        "bench": "update",
        "groups": groups,
        "arms": {arm: found for arm, (found, _) in ratios.items()},
        "interval": ratios["all"][1],
        "intervals": {arm: interval for arm, (_, interval) in ratios.items()},
        "stock_shares": {
            "update": round(total("stock", "update") / total("stock", "seconds"), 3),
            "old_log_prob": round(total("stock", "old_log_prob") / total("stock", "seconds"), 3),
        },
        "max_difference": max(record["difference"] for record in records if "difference" in record),
        "tokens_kept": round(kept, 3),
        # The share of the update's seconds in stock verl is divided by the share of computed tokens: 1.0 is in
        # proportion.
        "update_over_share": {
            arm: round(total(arm, "update") / total("stock", "update") / kept, 3)
            for arm in ("skip_zero_gradient", "all")
        },
        "seconds": {arm: round(total(arm, "seconds"), 2) for arm in ARMS},
        "update_seconds": {arm: round(total(arm, "update"), 2) for arm in ARMS},
        "old_log_prob_seconds": {arm: round(total(arm, "old_log_prob"), 2) for arm in ARMS},
        "samples": int(sum(record["samples"] for record in measured)),
        "lost": int(sum(record["lost"] for record in measured)),
    }


if __name__ == "__main__":
    command_line(__doc__, 8, run, report)
