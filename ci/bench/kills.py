"""Kill engines of real vLLM (SIGKILL) in the middle of a step, each at another moment, with migration and slices on;
every third engine belongs to the replica that is about to take over the tail.

A killed engine ends the run after its step, which is trained on all its samples and checkpointed, or, if the engine was
the last survivor of the tail, before the step is trained. The same command then goes on with the next step, or the same
step again, in which the next engine is killed. The bench counts samples lost or trained twice, prompts that a resumed
run repeats, and runs that end otherwise.

    python -m ci.bench.kills [--kills 10] [--seed 0]
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration"))
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

PROMPTS, REPLICAS = 10, 2
SAMPLES = 4 * PROMPTS


def overrides(kills: int) -> list[str]:
    """Return overrides of the recipe ppo-cpu: a long tail of ten among forty samples, which migrates when twelve are
    left. Only the step of a dead replica is saved."""
    return [
        *SMALL,
        *SMALL_CRITIC,
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
        "fuse.interstage.enabled=true",
        "fuse.interstage.migration_threshold=12",
        "fuse.interstage.layout=slices",
        f"trainer.total_training_steps={kills + 1}",
        f"trainer.save_freq={kills + 2}",
        "trainer.resume_mode=auto",
    ]


def kill(home: Path, number: int, when: str, settings: list[str]) -> dict[str, Any]:
    """Return the outcome of a run in whose first step an engine is killed at the moment `when`, in the format of
    support/killed_engine.py."""
    record = home / f"kill_{number}"
    record.mkdir()
    step = last_saved(home) + 1
    begun = time.monotonic()
    variables = {"KILL_ENGINE": f"{step}:{when}"}
    done = run(
        home, "ppo-cpu", *settings, name="kills", record=record, recorder="long_tail,killed_engine", variables=variables
    )
    outcome = {"step": step, "when": when, "seconds": round(time.monotonic() - begun, 1), **victim(record)}
    faults = wrong(home, done, step, outcome)
    print(json.dumps({**outcome, "faults": faults}), file=sys.stderr, flush=True)
    if faults:
        print(done.output[-3000:], file=sys.stderr, flush=True)
    return {**outcome, "faults": faults}


def victim(record: Path) -> dict[str, Any]:
    """Return the process that the run killed, and how many samples were finished at that moment."""
    file = record / "victim.json"
    return json.loads(file.read_text()) if file.exists() else {}


def last_saved(home: Path) -> int:
    """Return the step of the newest checkpoint; 0 without a checkpoint."""
    file = home / "kills" / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def wrong(home: Path, done: Finished, step: int, outcome: dict[str, Any]) -> list[str]:
    """Return the faults of a run."""
    faults, replica = [], outcome.get("replica")
    if "EngineCor" not in outcome.get("name", ""):
        faults.append(f"killed {outcome.get('name', 'nobody')}, not an engine")
    elif Path(f"/proc/{outcome['pid']}").exists():
        faults.append(f"the engine {outcome['pid']} lives")
    if outcome.get("finished", SAMPLES) >= SAMPLES:
        faults.append("killed after the step's last sample")
    trained = "so the step is not trained" not in done.output
    account = done.accounts().get(step, {})
    expected = (SAMPLES, 0, PROMPTS) if trained else (None, None, None)
    if (account.get("samples"), account.get("missing"), account.get("groups")) != expected:
        faults.append(f"step {step}: lost or duplicated: {account}")
    if done.code == 0 or not re.search(rf"FuseError: .*replica {replica}\b", done.output):
        faults.append(f"ended with {done.code} and did not name replica {replica}")
    if last_saved(home) != step - (not trained):
        faults.append(f"step {last_saved(home)} was saved, not {step - (not trained)}")
    return faults


def report(outcomes: list[dict[str, Any]], accounts: dict[int, dict]) -> dict[str, Any]:
    """Return the benchmark's JSON line. `repeated_prompts`: prompts trained in two steps, before the data set was
    through."""
    trained = len(accounts)
    prompts = Counter(prompt for account in accounts.values() for prompt in account["prompts"])
    return {
        "bench": "kills",
        "kills": len(outcomes),
        "ended_before_training": len(outcomes) - trained,
        "finished_when_killed": [outcome.get("finished") for outcome in outcomes],
        "samples_trained": sum(account["samples"] for account in accounts.values()),
        "samples_missing": sum(account["missing"] for account in accounts.values()),
        "repeated_prompts": sum(count > 1 for count in prompts.values()),
        "longest_run_seconds": max(outcome["seconds"] for outcome in outcomes),
        "faults": sum(len(outcome["faults"]) for outcome in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    settings = overrides(args.kills)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        outcomes = []
        for number in range(args.kills):
            when = "move" if number % 3 == 2 else f"{rng.randrange(REPLICAS)}:{rng.randrange(1, SAMPLES - 3)}"
            outcomes.append(kill(home, number, when, settings))
            if outcomes[-1]["faults"]:
                break
        accounts = Finished(0, "", "", home / "kills").accounts()
    print(json.dumps(report(outcomes, accounts)))
    sys.exit(any(outcome["faults"] for outcome in outcomes))


if __name__ == "__main__":
    main()
