"""Finds by simulation the tail and the number of devices from which a streamed update pays: GRPO on H100, one update a
step.

Each row is a model on so many devices, lengths with a spread `sigma`, and a correlation of lengths within a group.
Stock has its fastest layouts. The stream has replicas of its fastest size among the sizes where a copy of the actor
fits. `copies` is the update in that layout after generation. Ratios are stock's update without the old log-prob pass
over the arm's, sums of seconds over seeds, with a bootstrap over them (95 %).

    python -m ci.bench.stream_simulated [--seeds 4]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError
from verl_fuse.simulate.compare import estimate
from verl_fuse.simulate.copies import why_not
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import replica_timing
from verl_fuse.simulate.step import StepResult, simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.arrays import Floats
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Workload

BASE, COPIES, STREAM, MOVED = "old_log_prob", "copies", "stream", "stream+interstage"
# Model, nodes of eight devices, prompts of eight samples.
SIZES = (("qwen2.5-1.5b", 1, 128), ("qwen2.5-7b", 1, 128), ("qwen2.5-7b", 4, 256), ("qwen2.5-32b", 32, 512))
SIGMAS, CORRELATIONS = (0.4, 0.8, 1.2), (0.0, 0.8)


def workload_of(model: str, prompts: int, sigma: float) -> Workload:
    """Return a workload of eight samples a prompt, of a median of 1500 tokens and 16384 at most."""
    return Workload.from_dict(
        {
            "algorithm": "grpo",
            "prompts": prompts,
            "samples": 8,
            "prompt": "lognormal:median=200,sigma=0.6,max=1024",
            "response": f"lognormal:median=1500,sigma={sigma},max=16384",
            "actor": model,
        }
    )


def placed(plan: Plan, size: int) -> Plan:
    """Return the plan with rollout replicas of so many devices."""
    devices = plan.devices
    generate = CallPlan("actor_generate", Mesh(0, devices), Layout(tp=size, dp=devices // size))
    return replace(plan, calls=(generate, *plan.calls[1:]))


def fitting(
    workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions
) -> Iterator[tuple[int, Plan]]:
    """Yield sizes of a replica that hold a copy of the actor, with their plans."""
    for size in (1, 2, 4, 8):
        found = placed(plan, size)
        try:
            replica_timing(workload, found.call("actor_generate"), cost, options)
        except FuseError:
            # The model's weights alone do not fit there.
            continue
        if why_not(workload, found, cost, options) is None:
            yield size, found


def row(model: str, nodes: int, prompts: int, sigma: float, correlation: float, seeds: int) -> dict[str, Any]:
    """Return the ratios of one setting, for the size of a replica with which the stream is fastest."""
    workload, options = workload_of(model, prompts, sigma), SimulationOptions(predictability=correlation)
    cost = cost_model(cluster_named("h100", nodes=nodes))
    plan = stock_plan(workload, cost, options)

    def steps(strategy: str, at: Plan) -> list[StepResult]:
        return [
            simulate_step(workload, at, cost, strategy, np.random.default_rng(seed), options) for seed in range(seeds)
        ]

    def seconds(results: list[StepResult]) -> Floats:
        return np.array([result.seconds for result in results])

    base = steps(BASE, plan)
    said: dict[str, Any] = {"model": model, "devices": 8 * nodes, "sigma": sigma, "correlation": correlation}
    said |= {"base_seconds": round(float(seconds(base).mean()), 1)}
    said |= {"update_share": round(float(np.mean([one.stages["update_actor"] / one.seconds for one in base])), 2)}
    tried = [(size, {arm: steps(arm, at) for arm in (COPIES, STREAM, MOVED)})
             for size, at in fitting(workload, plan, cost, options)]  # fmt: skip
    if not tried:
        return said | {"replica": None}
    size, arms = min(tried, key=lambda one: min(seconds(one[1][arm]).sum() for arm in (STREAM, MOVED)))
    shares = {arm: np.mean([one.generation.streamed.share for one in found if one.generation.streamed])
              for arm, found in arms.items()}  # fmt: skip
    for arm, found in arms.items():
        ratio = estimate(seconds(base), seconds(found))
        said[arm] = [round(value, 3) for value in (ratio.mean, ratio.low, ratio.high)]
    return said | {"replica": size, "streamed": {arm: round(float(shares[arm]), 2) for arm in (STREAM, MOVED)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    seeds = parser.parse_args().seeds
    rows = []
    for model, nodes, prompts in SIZES:
        for sigma in SIGMAS:
            for correlation in CORRELATIONS:
                rows.append(row(model, nodes, prompts, sigma, correlation, seeds))
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"bench": "stream_simulated", "rows": rows}))


if __name__ == "__main__":
    main()
