"""Replica-seconds of a skewed rollout: a static pool routed by verl against `fuse.elastic` with length-aware assignment, scaling and release.

One run of the recipe ppo-cpu with real vLLM on two replicas, one core each. The two steps of a pair generate the same lengths, one arm each, in
random order; every prompt has a usual length, which drifts from pair to pair and varies from sample to sample. The first pairs are for learning
and are left out. A replica is held from when generation begins until it ends or the replica has been given up. The interval is a bootstrap over
pairs (95 %).

    python -m ci.bench.elastic [--pairs 10] [--cost-weight 0.5] [--keep DIRECTORY]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ci.bench import interstage

ARMS = ("static", "elastic")
LEARNING = 2
# Response tokens: every prompt's usual length is a quantile of a lognormal distribution.
MEDIAN, SIGMA, DRIFT, NOISE = 60, 1.2, 0.1, 0.15
HIDDEN, LAYERS = 128, 4
PROMPTS = 8


def make_plan(pairs: int, measurements: Path) -> dict[str, Any]:
    """See arms/bench_plan.py."""
    rng = np.random.default_rng(interstage.SEED)
    prompts, n = PROMPTS, interstage.SAMPLES_PER_PROMPT
    quantiles = np.array([NormalDist().inv_cdf((prompt + 0.5) / prompts) for prompt in range(prompts)])
    usual = rng.permutation(MEDIAN * np.exp(SIGMA * quantiles))
    lengths = []
    for _ in range(pairs):
        samples = np.repeat(usual, n) * np.exp(NOISE * rng.standard_normal(prompts * n))
        lengths.append(np.clip(samples, interstage.SHORTEST, interstage.LONGEST).astype(int).tolist())
        usual = usual * np.exp(DRIFT * rng.standard_normal(prompts))
    return {
        "arms": [str(arm) for _ in range(pairs) for arm in rng.permutation(ARMS)],
        "arms_per_group": len(ARMS),
        "lengths": lengths,
        "samples_per_prompt": n,
        "measurements": str(measurements),
    }


def overrides(folder: Path, steps: int, cost_weight: float) -> list[str]:
    """Those of the bench `interstage`, with its features off and this one on."""
    common = [
        entry for entry in interstage.overrides(folder, steps, PROMPTS) if not entry.startswith("fuse.interstage.")
    ]
    return [
        *common,
        "fuse.elastic.enabled=true",
        "fuse.elastic.scale=true",
        f"fuse.elastic.cost_weight={cost_weight}",
        "fuse.elastic.release=true",
    ]


def run(folder: Path, pairs: int, cost_weight: float) -> list[dict[str, Any]]:
    """Measurements of every step, those for learning left out."""
    interstage.make_task(folder, HIDDEN, LAYERS, PROMPTS)
    plan = make_plan(pairs + LEARNING, folder / "measurements.jsonl")
    (folder / "plan.json").write_text(json.dumps(plan))
    log = folder / "run.log"
    code = interstage.launch(folder, "elastic_arms", overrides(folder, len(plan["arms"]), cost_weight), log)
    if code:
        sys.exit(f"the run ended with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")
    records = [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]
    return records[LEARNING * len(ARMS) :]


def report(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The benchmark's JSON line."""

    def of(arm: str, part: str) -> np.ndarray:
        return np.array([record[part] for record in records if record["arm"] == arm], dtype=float)

    static, elastic = (of(arm, "replica_seconds") for arm in ARMS)
    drawn = np.random.default_rng(interstage.SEED).integers(0, len(static), (10_000, len(static)))
    saved = 1 - elastic[drawn].sum(axis=1) / static[drawn].sum(axis=1)
    walls = of("elastic", "seconds")[drawn].sum(axis=1) / of("static", "seconds")[drawn].sum(axis=1)

    def interval(values: np.ndarray) -> list[float]:
        return [round(float(value), 3) for value in np.quantile(values, [0.025, 0.975])]

    predicted, measured = of("elastic", "predicted"), of("elastic", "seconds")
    return {
        "bench": "elastic",
        "pairs": len(static),
        "static_replica_seconds": round(float(static.sum()), 2),
        "elastic_replica_seconds": round(float(elastic.sum()), 2),
        "saved": round(float(1 - elastic.sum() / static.sum()), 3),
        "saved_interval": interval(saved),
        "wall_ratio": round(float(measured.sum() / of("static", "seconds").sum()), 3),
        "wall_ratio_interval": interval(walls),
        "replicas": sorted(set(of("elastic", "replicas").astype(int).tolist())),
        "predicted_over_measured": round(float(predicted.sum() / measured.sum()), 3),
        "prefills": {arm: round(float(of(arm, "prefills").mean()), 3) for arm in ARMS},
        "moved": int(of("elastic", "moved").sum()),
        "lost": int(sum(record["lost"] for record in records)),
        "wrong_lengths": sum(not record["whole"] for record in records),
        "fallbacks": int(max(record["fallbacks"] for record in records)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--cost-weight", type=float, default=0.5)
    parser.add_argument("--keep", type=Path, help="leave plan, timelines and measurements here")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True)
        print(json.dumps(report(run(args.keep.resolve(), args.pairs, args.cost_weight))))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(report(run(Path(folder), args.pairs, args.cost_weight))))


if __name__ == "__main__":
    main()
