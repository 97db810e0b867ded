"""Measure seconds, gap and memory of the plan search, 8 to 1024 devices and 7B to 405B, the costing of options included
in the time it has: 10 s to 128 devices, 30 s to 512, 60 s beyond. Some rows in a minute and a half, `--all` in four,
`--only NAME` for one.

Each row is a process of its own, so that the memory is its own; kernels are compiled before the clock starts.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from verl_fuse.cost.profiled import cost_model
from verl_fuse.plan.planner import best_plan, full_space, move_seconds
from verl_fuse.plan.search import compile_kernels
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.workload import Workload

ROWS = {
    "7B-8": ("llama-7b", 1, 128),
    "7B-32": ("llama-7b", 4, 512),
    "13B-16": ("llama-13b", 2, 256),
    "34B-64": ("llama-2-34b", 8, 512),
    "70B-64": ("llama-2-70b", 8, 512),
    "70B-128": ("llama-2-70b", 16, 512),
    "70B-256": ("llama-2-70b", 32, 1024),
    "70B-512": ("llama-2-70b", 64, 2048),
    "405B-512": ("llama-3.1-405b", 64, 1024),
    "405B-1024": ("llama-3.1-405b", 128, 2048),
}
SOME = ("7B-8", "34B-64", "70B-128", "405B-1024")


def workload(model: str, prompts: int) -> Workload:
    """Return PPO with four models of one size."""
    actor = model_named(model)
    value = actor.as_value_model()
    lengths = LengthDistribution.parse("fixed:512"), LengthDistribution.parse("lognormal:median=400,sigma=1.0,max=1024")
    return Workload("ppo", prompts, 1, *lengths, actor, value, actor, value, minibatches=4)


def row(name: str) -> dict:
    """Return one search: seconds in all, of which to cost the options; gap; largest memory of the process in MiB."""
    model, nodes, prompts = ROWS[name]
    compile_kernels()
    # This search compiles the code that costs options.
    search(*ROWS["7B-8"], 0.5)
    begun, used = time.perf_counter(), time.process_time()
    devices = 8 * nodes
    found, costing = search(model, nodes, prompts, 10.0 if devices <= 128 else 30.0 if devices <= 512 else 60.0)
    return {
        "name": name,
        "devices": devices,
        "options": found.options,
        "step_seconds": round(found.seconds, 3),
        "gap": round(found.gap, 6),
        "seconds": round(time.perf_counter() - begun, 2),
        "processor_seconds": round(time.process_time() - used, 2),
        "costing_seconds": round(costing, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def search(model: str, nodes: int, prompts: int, limit: float):
    """Search, and return the result with the seconds that costing the options took; the limit holds for both."""
    step, cost = workload(model, prompts), cost_model(cluster_named("h100", nodes))
    begun = time.perf_counter()
    space = full_space(step, cost)
    costing = time.perf_counter() - begun
    return best_plan(space, move_seconds(step, cost), max(0.5, limit - costing)), costing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(row(args.only)))
        return
    rows = []
    for name in ROWS if args.all else SOME:
        process = subprocess.run(
            [sys.executable, "-m", "ci.bench.plan", "--only", name], stdout=subprocess.PIPE, check=True
        )
        rows.append(json.loads(process.stdout))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"bench": "plan", "rows": rows}))


if __name__ == "__main__":
    main()
