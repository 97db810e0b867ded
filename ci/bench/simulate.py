"""Measure the speed of the simulator: 1000 steps of 512 samples on 32 replicas per strategy, the run-time threshold
decision, and growth with the cluster.

The bench prints a table while running and one JSON line last. Seconds are processor seconds of one core, so that other
work on the machine does not count; compilation, which numba caches, counts in the first step only.

    python -m ci.bench.simulate [--steps 1000]
"""

import argparse
import json
import resource
import time
from collections.abc import Callable

import numpy as np

from verl_fuse.cost.profiled import cost_model
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import replica_timing
from verl_fuse.simulate.rollout import Requests
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.simulate.tail import InferenceWork, MigrationCost
from verl_fuse.simulate.threshold import best_threshold
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan
from verl_fuse.spec.workload import Workload

ALL = "interstage+pipeline+scaling"
STRATEGIES = ("stock", "interstage", "pipeline", "scaling", ALL)
SCALING = (
    (8, "llama-7b"), (64, "llama-7b"), (64, "llama-2-70b"), (256, "llama-2-70b"), (1024, "llama-2-70b"),
    (1024, "llama-3.1-405b"),
)  # fmt: skip


def workload(actor: str, samples: int = 512, response: int = 1024) -> Workload:
    return Workload.from_dict(
        {
            "algorithm": "ppo",
            "prompts": samples,
            "prompt": "lognormal:median=128,sigma=0.7,max=512",
            "response": f"lognormal:median=250,sigma=0.9,max={response}",
            "actor": actor,
            "critic": "llama-7b",
            "reference": actor,
            "reward": "llama-7b",
            "minibatches": 8,
        }
    )


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def thousand_steps(steps: int) -> dict[str, float]:
    """Return the seconds of `steps` steps on 32 replicas of 4 devices, by strategy."""
    step, cost, options = workload("llama-13b"), cost_model(cluster_named("h100", nodes=16)), SimulationOptions()
    plan = stock_plan(step, cost, options)
    rollout = CallPlan("actor_generate", Mesh(0, 128), Layout(tp=4, dp=32))
    plan = type(plan)((rollout, *plan.calls[1:]))
    found = {}
    for strategy in STRATEGIES:
        rng = np.random.default_rng(0)
        first = seconds(lambda: simulate_step(step, plan, cost, strategy, rng, options))  # noqa: B023
        found[strategy] = seconds(
            lambda: [simulate_step(step, plan, cost, strategy, rng, options) for _ in range(steps)]  # noqa: B023
        )
        print(f"{strategy:12} {steps} steps {found[strategy]:6.2f} s, the first {first:.2f} s", flush=True)
    return {name: round(value, 2) for name, value in found.items()}


def threshold_decision() -> float:
    """Return the milliseconds of a decision on two draws of 4096 samples on 64 replicas, the best of six."""
    cost, step = cost_model(cluster_named("h100", nodes=32)), workload("llama-13b", 4096, 2048)
    timing = replica_timing(
        step, CallPlan("actor_generate", Mesh(0, 256), Layout(tp=4, dp=64)), cost, SimulationOptions()
    )
    rng = np.random.default_rng(0)
    draws = [Requests.of(step.prompt.sample(rng, 4096), step.response.sample(rng, 4096)) for _ in range(2)]
    inference = InferenceWork(per_token=2e-4, load_seconds=0.3, last_seconds=0.05)
    times = [seconds(lambda: best_threshold(draws, 64, timing, inference, MigrationCost(0.1))) for _ in range(6)]
    print(f"threshold: {min(times) * 1e3:.1f} ms, slowest {max(times[1:]) * 1e3:.1f} ms", flush=True)
    return round(min(times) * 1e3, 1)


def scaling() -> list[dict]:
    """Return the seconds to place, to compile the tables and to simulate one step, by cluster."""
    rows = []
    for devices, actor in SCALING:
        step, cost, options = (
            workload(actor),
            cost_model(cluster_named("h100", nodes=devices // 8)),
            SimulationOptions(),
        )
        placing = seconds(lambda: stock_plan(step, cost, options))  # noqa: B023
        plan, rng = stock_plan(step, cost, options), np.random.default_rng(0)
        first = seconds(lambda: simulate_step(step, plan, cost, ALL, rng, options))  # noqa: B023
        again = seconds(lambda: [simulate_step(step, plan, cost, ALL, rng, options) for _ in range(20)]) / 20  # noqa: B023
        row = {
            "devices": devices,
            "actor": actor,
            "placing_seconds": round(placing, 2),
            "first_step_seconds": round(first, 2),
            "step_milliseconds": round(again * 1e3, 2),
        }
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    report = {
        "bench": "simulate",
        "steps": args.steps,
        "step_seconds": thousand_steps(args.steps),
        "threshold_milliseconds": threshold_decision(),
        "scaling": scaling(),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
