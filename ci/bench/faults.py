"""Run seeded fault schedules, one step each, through trainer, agent loop, replay buffer, load balancer and
TransferQueue (tests/integration/support/schedule_runs.py).

The bench counts faults: a sample lost, in the batch twice, or of other weights than the step's; a step that hangs; any
other fault.

    python -m ci.bench.faults [--schedules 300] [--first 0]
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_fuse_cpu.environment import environment as cpu_environment

if TYPE_CHECKING:
    from schedule_runs import Outcome

SUPPORT = Path(__file__).parents[2] / "tests/integration/support"
SIGNS = {"lost": ": lost", "duplicated": ": duplicated", "wrong_weights": ": wrong weights", "hung": "hung: "}


def run(first: int, schedules: int) -> list["Outcome"]:
    """Return the outcomes of the schedules of these seeds, one run after the other."""
    from ci.bench.support.untrained import local_cluster
    from verl_fuse_cpu.task.tokenizer import build_tokenizer
    from verl_fuse_cpu.task.warm_start import build_model

    variables = {**cpu_environment(), "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])}
    with local_cluster(variables, object_store_bytes=100_000_000), tempfile.TemporaryDirectory() as folder:
        from fault_schedules import schedule
        from schedule_runs import ScheduleRuns

        # Agents load tokenizer and configuration; nobody computes with the model.
        model = Path(folder) / "model"
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(model)
        build_model(tokenizer).save_pretrained(model)
        with contextlib.closing(ScheduleRuns(Path(folder))) as runs:
            return [shown(runs.run(schedule(seed))) for seed in range(first, first + schedules)]


def shown(outcome: "Outcome") -> "Outcome":
    """Print the outcome with its faults, and return the outcome."""
    one, end = outcome.schedule, f", ended with {outcome.error[:90]}" if outcome.error else ""
    counts = f"{outcome.trained} trained, {outcome.failed} failed, {outcome.moved} moved"
    print(f"seed {one.seed} ({one.kind}): {counts}, {outcome.seconds:.1f} s{end}", file=sys.stderr, flush=True)
    for fault in outcome.faults:
        print(f"seed {one.seed} FAULT: {fault}", file=sys.stderr, flush=True)
    return outcome


def report(outcomes: Sequence["Outcome"], seconds: float) -> dict[str, Any]:
    """Return the benchmark's JSON line."""
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    counted = {name: sum(sign in fault for fault in faults) for name, sign in SIGNS.items()}
    return {
        "bench": "faults",
        "schedules": len(outcomes),
        "kinds": Counter(outcome.schedule.kind for outcome in outcomes),
        "seconds": round(seconds, 1),
        "longest_step_seconds": round(max(outcome.seconds for outcome in outcomes), 2),
        "samples_trained": sum(outcome.trained for outcome in outcomes),
        "rollouts_failed": sum(outcome.failed for outcome in outcomes),
        "requests_moved": sum(outcome.moved for outcome in outcomes),
        "ended_loudly": sum(outcome.error is not None for outcome in outcomes),
        **counted,
        "other_faults": len(faults) - sum(counted.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    # The environment is set before verl is imported, here and in Ray's processes.
    os.environ.update(cpu_environment())
    sys.path.insert(0, str(SUPPORT))
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    outcomes = run(args.first, args.schedules)
    print(json.dumps(report(outcomes, time.monotonic() - begun)))
    sys.exit(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    main()
