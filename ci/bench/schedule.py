"""Measure the fused schedule solver on the 12 published instances, on the same under a memory limit, on 32 ranks x 128
micro-batches, and on random problems.

The bench prints a table while running and one JSON line last. Seconds are wall-clock and mean little on a busy machine:
the CPU seconds tell the solver's own share. Every part can be run by itself:

    python ci/bench/schedule.py --seconds 60 [--instances 0,1,2] [--no-free] [--no-limited] [--no-large] [--random 500]
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "schedule"))
from brute_force import pareto
from checker import faults
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule

TINY_SECONDS = 10.0


def large() -> ScheduleProblem:
    actor = Pipeline("actor", range(32), 128, 2, 4, 1.64)
    critic = Pipeline("critic", range(31, -1, -1), 128, 1, 2, 1)
    return ScheduleProblem(32, (actor, critic))


def measured(name: str, problem: ScheduleProblem, args: argparse.Namespace, **compared: float | bool) -> dict:
    begun = time.process_time()
    schedule: Schedule = solve(problem, args.method, Budget(args.seconds, args.seed, args.workers))
    if wrong := faults(schedule):
        raise SystemExit(f"{name}: {wrong[0]}")
    figures = {
        "name": name,
        "makespan": schedule.makespan,
        "bound": schedule.lower_bound,
        "peak_memory": schedule.peak_memory,
        "memory_bound": round(schedule.memory_lower_bound, 3),
        "seconds": round(schedule.solve_seconds, 1),
        "cpu_seconds": round(time.process_time() - begun, 1),
        **compared,
    }
    print("  ".join(f"{key}={value}" for key, value in figures.items()), flush=True)
    return figures


def check_random(seed: int, args: argparse.Namespace) -> bool:
    """Solve and check one random problem; every fifth problem is tiny, has time to be proven, and must equal brute
    force. Return whether the problem was tiny."""
    tiny = seed % 5 == 0
    problem = random_problem(seed, ranks=2, pipelines=2, microbatches=2) if tiny else random_problem(seed)
    budget = Budget(TINY_SECONDS if tiny else args.random_seconds, args.seed, args.workers)
    schedule = solve(problem, args.method, budget)
    wrong = faults(schedule)
    if tiny:
        makespan, peak = pareto(problem)[0]
        if abs(schedule.makespan - makespan) > 1e-6 or abs(schedule.peak_memory - peak) > 1e-6:
            wrong = [*wrong, f"{schedule.makespan:g} @ {schedule.peak_memory:g}, brute force {makespan:g} @ {peak:g}"]
    if wrong:
        raise SystemExit(f"random problem {seed}: {wrong[0]}")
    return tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="portfolio")
    parser.add_argument("--instances", default=",".join(map(str, range(12))))
    parser.add_argument("--free", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limited", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--large", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--random", type=int, default=0, help="random problems to solve and check")
    parser.add_argument("--random-seconds", type=float, default=0.2)
    args = parser.parse_args()
    wanted = [PUBLISHED[int(i)] for i in args.instances.split(",") if i]
    results = []
    for row in wanted if args.free else []:
        compared = {
            "paper": row["paper_annealed"],
            "paper_memory": row["paper_mem_annealed"],
            "paper_seconds": row["paper_solve_seconds"],
        }
        results.append(measured(f"instance {row['id']}", published(row, None), args, **compared))
    for row in wanted if args.limited else []:
        limit = row["mem_serial_1f1b"]
        results.append(
            measured(
                f"instance {row['id']} limited", published(row, limit), args, limit=limit, serial=row["serial_1f1b"]
            )
        )
    if args.large:
        results.append(measured("32 ranks x 128", large(), args))
    tiny = sum(check_random(seed, args) for seed in range(args.random))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    met = [r for r in results if "paper_memory" in r]
    summary = {
        "benchmark": "schedule",
        "at_bound": sum(r["makespan"] <= r["bound"] + 1e-9 for r in met),
        "memory_within_paper": sum(r["peak_memory"] <= r["paper_memory"] + 1e-9 for r in met),
        "of": len(met),
        "peak_rss_gib": round(peak, 2),
        "random_checked": args.random,
        "of_them_by_brute_force": tiny,
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
