"""Simulate the ladder of whole steps at scale: stock verl on H100, then one feature of verl-fuse after the other.

The cases are GRPO without KL, and PPO with critic and reference: Llama 2 7B on 8 devices, 32B on 256, 70B on 512.
Lengths are lognormal with the mean or the limit of published runs: 7B like DeepScaleR's first stage (8,192 tokens at
most, 3,500 on average after the stage), 32B and 70B in the setting of DAPO (512 prompts x 16, 20,480 tokens at most);
the spread is assumed. The share of samples without a gradient and the acceptance of drafts are assumed, too;
`--zero-gradient` and `--acceptance` change them. Ratios are stock over verl-fuse, of sums over seeds, with 95 %
intervals.

verl_fuse/simulate/README.md has the error of such a prediction on a CPU ladder of the same features.

    python -m ci.bench.ladder [--seeds 4] [--acceptance 0.7] [--zero-gradient 0.4] [--picture FILE.svg]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci.bench.support.picture import draw
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.simulate.compare import StrategyResult, compare
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.workload import Workload

PROMPT = "lognormal:median=200,sigma=0.6,max=1024"
SIZES: Mapping[str, dict[str, Any]] = {
    "7B on 8": {
        "model": "llama-7b",
        "devices": 8,
        "prompts": 128,
        "samples": 8,
        "response": "lognormal:median=2900,sigma=0.65,max=8192",
    },
    "32B on 256": {
        "model": "qwen2.5-32b",
        "devices": 256,
        "prompts": 512,
        "samples": 16,
        "response": "lognormal:median=3500,sigma=0.9,max=20480",
    },
    "70B on 512": {
        "model": "llama-2-70b",
        "devices": 512,
        "prompts": 512,
        "samples": 16,
        "response": "lognormal:median=3500,sigma=0.9,max=20480",
    },
}
# Each rung has the simulator's name of its strategy.
LADDERS: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        "observe": "observe",
        "skip_zero_gradient": "zero_gradient",
        "skip_old_log_prob": "update",
        "speculation": "update+speculation",
    },
    "ppo": {
        "observe": "observe",
        "interstage": "interstage",
        "speculation": "tail",
        "pipeline": "tail+pipeline",
    },
}


def workload(algorithm: str, size: Mapping[str, Any], zero_gradient: float) -> Workload:
    step = {"algorithm": algorithm, "prompt": PROMPT, "actor": size["model"]}
    step |= {key: size[key] for key in ("prompts", "samples", "response")}
    if algorithm == "ppo":
        # GRPO needs groups of samples; PPO has more prompts in place of most samples of a group.
        step |= {"critic": size["model"], "reference": size["model"]}
        step |= {"prompts": size["prompts"] * size["samples"] // 4, "samples": 4, "minibatches": 4}
    else:
        step["zero_gradient"] = zero_gradient
    return Workload.from_dict(step)


def case(algorithm: str, name: str, seeds: int, acceptance: float, zero_gradient: float) -> dict[str, Any]:
    size, ladder = SIZES[name], LADDERS[algorithm]
    cost = AnalyticCost(cluster_named("h100", nodes=size["devices"] // 8))
    options = SimulationOptions(acceptance=acceptance)
    step = workload(algorithm, size, zero_gradient)
    rows = {row.strategy: row for row in compare(step, cost, [*ladder.values()], seeds, options=options)}
    return {
        "case": f"{algorithm}, {name}",
        "stock_seconds": round(rows["stock"].seconds.mean, 1),
        "ladder": {rung: ratio(rows[strategy]) for rung, strategy in ladder.items()},
    }


def ratio(row: StrategyResult) -> dict[str, Any]:
    gain = row.speedup
    return {"ratio": round(gain.mean, 3), "interval": [round(gain.low, 3), round(gain.high, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--zero-gradient", type=float, default=0.4)
    parser.add_argument("--picture", type=Path, help="an SVG file of the ladder")
    given = parser.parse_args()
    cases = []
    for algorithm in LADDERS:
        for name in SIZES:
            cases.append(case(algorithm, name, given.seeds, given.acceptance, given.zero_gradient))
            print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    if given.picture:
        draw(cases, given.picture)
    assumed = {"acceptance": given.acceptance, "zero_gradient": given.zero_gradient}
    print(json.dumps({"bench": "ladder", "simulated": True, **assumed, "cases": cases}))


if __name__ == "__main__":
    main()
