"""Compare our search with Metropolis on ReaL's settings (tests/golden/real_settings.py), under the same cost model and
over the same options.

Metropolis walks for `--seconds`, from the fastest option of each call; our search has a tenth of that, the costing of
options included.

    python -m ci.bench.real_plans                              # three settings, 20 s against 2 s
    python -m ci.bench.real_plans --all --seconds 120          # all 33: more than an hour
    python -m ci.bench.real_plans --only "both 128 gen384" --seconds 120
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import EAGER
from verl_fuse.plan.branch import every_option
from verl_fuse.plan.heuristic import megatron_heuristic, predicted_seconds
from verl_fuse.plan.metropolis import metropolis
from verl_fuse.plan.planner import best_plan, full_space, move_seconds
from verl_fuse.plan.search import compile_kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "golden"))
from real_settings import Setting, settings

FEW = ("both 32 gen128", "critic 32 gen896", "both 64 gen384")


def row(setting: Setting, seconds: float, seed: int) -> dict:
    """Run both searches on one setting, and the Megatron heuristic; return wall and processor seconds."""
    begun, used = time.monotonic(), time.process_time()
    workload, cost = setting.workload, AnalyticCost(setting.cluster, EAGER)
    space, move = full_space(workload, cost), move_seconds(workload, cost)
    found = best_plan(space, move, max(0.1, seconds / 10 - (time.monotonic() - begun)))
    wall, processor = time.monotonic() - begun, time.process_time() - used
    space = space.with_room_for_moves()
    t = space.tables
    fastest = [t.begin[c] + np.argmin(t.seconds[t.begin[c] : t.begin[c + 1]]) for c in range(len(space.calls))]
    used = time.process_time()
    _, walked, proposals = metropolis(space, move, every_option(t), np.array(fastest, np.int64), seconds, seed=seed)
    return {
        "name": setting.name,
        "heuristic_seconds": round(predicted_seconds(megatron_heuristic(workload, cost), workload, cost), 4),
        "plan_seconds": round(found.seconds, 4),
        "gap": round(found.gap, 6),
        "wall": round(wall, 2),
        "processor": round(processor, 2),
        "metropolis_seconds": round(walked, 4),
        "metropolis_processor": round(time.process_time() - used, 1),
        "proposals": proposals,
        "plan_against_metropolis": round(found.seconds / walked - 1.0, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", choices=[setting.name for setting in settings()])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = [args.only] if args.only else [s.name for s in settings()] if args.all else FEW
    compile_kernels()
    # Compiles what costs options.
    full_space(settings()[0].workload, AnalyticCost(settings()[0].cluster, EAGER))
    rows = []
    for setting in settings():
        if setting.name in wanted:
            rows.append(row(setting, args.seconds, args.seed))
            print(json.dumps(rows[-1]), flush=True)
    worst = max(found["plan_against_metropolis"] for found in rows)
    print(json.dumps({"bench": "real_plans", "seconds": args.seconds, "worst_against_metropolis": worst, "rows": rows}))


if __name__ == "__main__":
    main()
