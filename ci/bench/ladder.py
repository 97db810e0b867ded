"""Simulate the ladder of whole steps at scale: stock verl on H100, then one feature of verl-fuse after the other, as
`verl-fuse simulate` does.

The cases are GRPO without KL and one update a step, the same with DAPO's 16 updates of filtered groups, and PPO with
critic and reference: Llama 2 7B and Qwen2.5 7B on 8 devices, Qwen2.5 32B on 256, Llama 2 70B on 512; and what most
public scripts run, GRPO with a KL loss and 4 mini-batches on FSDP, Qwen2.5 7B on 8 and 32B on 64. Lengths are
lognormal with the mean or the limit of published runs: 7B like DeepScaleR's first stage (8,192 tokens at most, 3,500 on
average after the stage), 32B and 70B in the setting of DAPO (512 prompts x 16, 20,480 tokens at most); the spread is
assumed. The share of samples without a gradient and the acceptance of drafts are assumed, too, each as a range: a low,
a middle and a high value. Filtered groups leave no sample without a gradient; that more groups are generated than
trained on is not simulated.

Ratios are stock over verl-fuse, of sums over seeds, at the middle values; intervals go from the low values to the high
ones. `seeds`: the most that a 95 % interval over seeds goes beyond its mean.

verl_fuse/simulate/README.md has the error of such a prediction on a CPU ladder of the same features.

    python -m ci.bench.ladder [--seeds 4] [--acceptance 0.5 0.6 0.7] [--zero-gradient 0.2 0.4 0.6] [--picture FILE.svg]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.bench.support.picture import draw
from verl_fuse.cost.profiled import cost_model
from verl_fuse.simulate.compare import compare
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.workload import Workload

PROMPT = "lognormal:median=200,sigma=0.6,max=1024"
DEEPSCALER = {"devices": 8, "prompts": 128, "samples": 8, "response": "lognormal:median=2900,sigma=0.65,max=8192"}
DAPO = {"prompts": 512, "samples": 16, "response": "lognormal:median=3500,sigma=0.9,max=20480"}
SIZES: Mapping[str, dict[str, Any]] = {
    "7B on 8": {"model": "llama-7b", **DEEPSCALER},
    "Qwen 7B on 8": {"model": "qwen2.5-7b", **DEEPSCALER},
    "32B on 256": {"model": "qwen2.5-32b", "devices": 256, **DAPO},
    "70B on 512": {"model": "llama-2-70b", "devices": 512, **DAPO},
    "32B on 64": {"model": "qwen2.5-32b", **DEEPSCALER, "devices": 64, "prompts": 512},
}
# The sizes of each ladder.
WHERE: Mapping[str, Sequence[str]] = {
    "grpo": ("7B on 8", "Qwen 7B on 8", "32B on 256", "70B on 512"),
    "dapo": ("32B on 256",),
    "common": ("Qwen 7B on 8", "32B on 64"),
    "ppo": ("7B on 8", "Qwen 7B on 8", "32B on 256", "70B on 512"),
}
# Each rung has the simulator's name of its strategy.
LADDERS: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        "observe": "observe",
        "skip_zero_gradient": "zero_gradient",
        "skip_old_log_prob": "zero_gradient+old_log_prob",
        "speculation": "zero_gradient+old_log_prob+speculation",
    },
    # Several updates a step need old log-probs.
    "dapo": {"observe": "observe", "interstage": "interstage", "speculation": "interstage+speculation"},
    # The last rung is what `fuse.preset=fast` chooses: old log-probs while others generate. Its `balance` and routing
    # are not simulated.
    "common": {
        "observe": "observe",
        "old_log_prob": "old_log_prob",
        "response_logits": "old_log_prob+response_logits",
        "share_prompts": "old_log_prob+response_logits+share_prompts",
        "fast": "interstage+response_logits+share_prompts",
    },
    "ppo": {
        "observe": "observe",
        "interstage": "interstage",
        "speculation": "interstage+speculation",
        "pipeline": "interstage+speculation+pipeline",
    },
}


def workload(algorithm: str, size: Mapping[str, Any], zero_gradient: float) -> Workload:
    step = {"algorithm": "ppo" if algorithm == "ppo" else "grpo", "prompt": PROMPT, "actor": size["model"]}
    step |= {key: size[key] for key in ("prompts", "samples", "response")}
    if algorithm == "ppo":
        # GRPO needs groups of samples; PPO has more prompts in place of most samples of a group.
        step |= {"critic": size["model"], "reference": size["model"]}
        step |= {"prompts": size["prompts"] * size["samples"] // 4, "samples": 4, "minibatches": 4}
    elif algorithm == "dapo":
        step["minibatches"] = 16
    elif algorithm == "common":
        step |= {"reference": size["model"], "kl": "loss", "minibatches": 4, "zero_gradient": zero_gradient}
    else:
        step["zero_gradient"] = zero_gradient
    return Workload.from_dict(step)


def case(
    algorithm: str, name: str, seeds: int, acceptances: Sequence[float], zero_gradients: Sequence[float]
) -> dict[str, Any]:
    size, ladder = SIZES[name], LADDERS[algorithm]
    cost = cost_model(cluster_named("h100", nodes=size["devices"] // 8))
    low, middle, high = (
        {
            row.strategy: row
            for row in compare(
                workload(algorithm, size, zero_gradient),
                cost,
                [*ladder.values()],
                seeds,
                options=SimulationOptions(acceptance=acceptance, engine="fsdp" if algorithm == "common" else None),
            )
        }
        for acceptance, zero_gradient in zip(acceptances, zero_gradients, strict=True)
    )
    gains = [found[strategy].speedup for found in (low, middle, high) for strategy in ladder.values()]
    return {
        "case": f"{algorithm}, {name}",
        "stock_seconds": round(middle["stock"].seconds.mean, 1),
        "seeds": round(max(max(gain.high - gain.mean, gain.mean - gain.low) for gain in gains), 3),
        "ladder": {
            rung: {
                "ratio": round(middle[strategy].speedup.mean, 3),
                "interval": [round(found[strategy].speedup.mean, 3) for found in (low, high)],
            }
            for rung, strategy in ladder.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    for name, values in (("--acceptance", (0.5, 0.6, 0.7)), ("--zero-gradient", (0.2, 0.4, 0.6))):
        parser.add_argument(name, type=float, nargs=3, default=values, metavar=("LOW", "MIDDLE", "HIGH"))
    parser.add_argument("--picture", type=Path, help="an SVG file of the ladder")
    given = parser.parse_args()
    cases = []
    for algorithm in LADDERS:
        for name in WHERE[algorithm]:
            cases.append(case(algorithm, name, given.seeds, given.acceptance, given.zero_gradient))
            print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    if given.picture:
        draw(cases, given.picture)
    assumed = {"acceptance": given.acceptance, "zero_gradient": given.zero_gradient}
    print(json.dumps({"bench": "ladder", "simulated": True, **assumed, "cases": cases}))


if __name__ == "__main__":
    main()
