"""Compare the replica-seconds of a skewed rollout: a static pool routed by verl against `fuse.elastic` with
length-aware assignment, scaling and release; and the policy against choices that never change.

The bench is one run of the recipe ppo-cpu with real vLLM on two replicas, one core each. The steps of a group generate
the same lengths, one arm each, in random order: static (verl's routing, both replicas to the end), fixed 1 and fixed 2
(so many replicas, with the policy's assignment and release), and the policy at each cost weight. Every prompt has a
usual length, which drifts from group to group and varies from sample to sample. The first groups are for learning and
are left out. A replica is held from the begin of generation until generation ends or the replica has been given up. The
interval is a bootstrap over groups (95 %); `saved` and `wall_ratio` compare the weight 0.5 with static;
support/regret.py computes the regret.

    python -m ci.bench.elastic [--groups 10] [--keep DIRECTORY]
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ci.bench import interstage
from ci.bench.support.regret import WEIGHTS, Taken, judged
from ci.bench.support.runs import SEED, bootstrap, command_line, interval, launch

REPLICAS = 2
STATIC, ELASTIC = "static", "elastic 0.5"
FIXED = tuple(f"fixed {count}" for count in range(1, REPLICAS + 1))
POLICIES = {weight: f"elastic {weight}" for weight in WEIGHTS}
ARMS = (STATIC, *FIXED, *POLICIES.values())
LEARNING = 2
# Every prompt's usual length, in response tokens, is a quantile of a lognormal distribution.
MEDIAN, SIGMA, DRIFT, NOISE = 60, 1.2, 0.1, 0.15
HIDDEN, LAYERS = 128, 4
PROMPTS = 8


def make_plan(groups: int, measurements: Path) -> dict[str, Any]:
    """Return the plan that arms/bench_plan.py reads."""
    rng = np.random.default_rng(SEED)
    prompts, n = PROMPTS, interstage.SAMPLES_PER_PROMPT
    quantiles = np.array([NormalDist().inv_cdf((prompt + 0.5) / prompts) for prompt in range(prompts)])
    usual = rng.permutation(MEDIAN * np.exp(SIGMA * quantiles))
    lengths = []
    for _ in range(groups):
        samples = np.repeat(usual, n) * np.exp(NOISE * rng.standard_normal(prompts * n))
        lengths.append(np.clip(samples, interstage.SHORTEST, interstage.LONGEST).astype(int).tolist())
        usual = usual * np.exp(DRIFT * rng.standard_normal(prompts))
    return {
        "arms": [str(arm) for _ in range(groups) for arm in rng.permutation(ARMS)],
        "arms_per_group": len(ARMS),
        "lengths": lengths,
        "samples_per_prompt": n,
        "measurements": str(measurements),
    }


def overrides(folder: Path, steps: int) -> list[str]:
    """Return the settings of the bench `interstage`, with its features off and `fuse.elastic` on."""
    common = [
        entry for entry in interstage.overrides(folder, steps, PROMPTS) if not entry.startswith("fuse.interstage.")
    ]
    return [
        *common,
        "fuse.elastic.enabled=true",
        "fuse.elastic.scale=true",
        "fuse.elastic.release=true",
    ]


def run(folder: Path, groups: int) -> list[dict[str, Any]]:
    """Return the measurements of every step after the groups for learning."""
    interstage.make_task(folder, HIDDEN, LAYERS, PROMPTS)
    plan = make_plan(groups + LEARNING, folder / "measurements.jsonl")
    (folder / "plan.json").write_text(json.dumps(plan))
    launch(folder, "elastic_arms", overrides(folder, len(plan["arms"])), folder / "run.log")
    records = [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]
    return records[LEARNING * len(ARMS) :]


def report(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the benchmark's JSON line."""

    def of(arm: str, part: str) -> np.ndarray:
        return np.array([record[part] for record in records if record["arm"] == arm], dtype=float)

    def taken(arm: str) -> list[Taken]:
        return [Taken(*both) for both in zip(of(arm, "seconds"), of(arm, "replica_seconds"), strict=True)]

    static, elastic = (of(arm, "replica_seconds") for arm in (STATIC, ELASTIC))
    sums = bootstrap(static, elastic, of(STATIC, "seconds"), of(ELASTIC, "seconds"))
    saved, walls = 1 - sums[:, 1] / sums[:, 0], sums[:, 3] / sums[:, 2]
    predicted, measured = of(ELASTIC, "predicted"), of(ELASTIC, "seconds")
    return {
        "bench": "elastic",
        "groups": len(static),
        "static_replica_seconds": round(float(static.sum()), 2),
        "elastic_replica_seconds": round(float(elastic.sum()), 2),
        "saved": round(float(1 - elastic.sum() / static.sum()), 3),
        "saved_interval": interval(saved),
        "wall_ratio": round(float(measured.sum() / of(STATIC, "seconds").sum()), 3),
        "wall_ratio_interval": interval(walls),
        "replicas": sorted(set(of(ELASTIC, "replicas").astype(int).tolist())),
        "predicted_over_measured": round(float(predicted.sum() / measured.sum()), 3),
        "prefills": {arm: round(float(of(arm, "prefills").mean()), 3) for arm in (STATIC, ELASTIC)},
        "moved": int(of(ELASTIC, "moved").sum()),
        "lost": int(sum(record["lost"] for record in records)),
        "wrong_lengths": sum(not record["whole"] for record in records),
        "fallbacks": int(max(record["fallbacks"] for record in records)),
        **judged(
            {weight: taken(arm) for weight, arm in POLICIES.items()}, {arm: taken(arm) for arm in FIXED}, FIXED[-1]
        ),
    }


if __name__ == "__main__":
    command_line(__doc__, 10, run, report)
