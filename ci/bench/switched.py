"""Compare a PPO run whose layout changes with the same run without a change: are the losses, and all other results, the
same?

Actor and critic go from shards to whole copies before step 3 of 6, the actor back to shards before step 5, for which
nothing has to move. There are three runs: the first records its rollouts, the second replays them, the third replays
them with the changes. Up to the first change the last two runs must be equal bit by bit, from then on up to the
rounding of float32 sums in another order; and layouts may change at no other time.

    python -m ci.bench.switched
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration"))
from verl_runs import RECORDING, SMALL, SMALL_CRITIC, Finished, run

from ci.upstream.ab.arms import STREAMING
from ci.upstream.ab.compare import Finding, step_findings
from ci.upstream.ab.record import PARAMETERS, Quantity, Step, quantities
from verl_fuse.cli.report import read_metrics

STEPS = 6
# The schedule gives by step and model: copies (1) from this step on, or shards over all ranks (-1).
SCHEDULE = {3: {"actor": 1, "critic": 1}, 5: {"actor": -1}}
SWITCHED = ("fuse.realloc.schedule={3:{actor:{fsdp_size:1},critic:{fsdp_size:1}},5:{actor:{fsdp_size:-1}}}",)
FIRST = min(SCHEDULE)
CHANGED, MOVED = "fuse/realloc_seconds", "fuse/realloc_bytes"
LOSSES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")


def train(home: Path, name: str, *extra: str) -> Finished:
    """Train six steps of PPO in `home`; the first run records its rollouts, all others replay them."""
    done = run(
        home,
        "ppo-cpu",
        *SMALL,
        *SMALL_CRITIC,
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "skip.rollout_tq.enable=true",
        f"skip.rollout_tq.steps={list(range(1, STEPS + 1))}".replace(" ", ""),
        f"skip.rollout_tq.dump_dir={home}/rollouts",
        f"trainer.total_training_steps={STEPS}",
        *extra,
        name=name,
        # verl files recorded rollouts by experiment name.
        experiment=RECORDING,
        record=home / f"{name}.numbers",
    )
    if done.code != 0:
        raise SystemExit(f"{done.output[-4000:]}\nthe run {name} ended with exit code {done.code}")
    return done


def step_of(home: Path, done: Finished, number: int, sizes: dict[str, int]) -> Step:
    """Return the numbers of a step, with whole parameters."""
    found = quantities(home / f"{done.folder.name}.numbers", number)
    whole_ones = {f"{role} {PARAMETERS}": whole(found[f"{role} {PARAMETERS}"], size) for role, size in sizes.items()}
    return Step(True, None, dict(read_metrics(done.folder / "metrics.jsonl"))[number], {**found, **whole_ones})


def whole(held: Quantity, size: int) -> Quantity:
    """Return parameters by name, made of the parts of all ranks (`rank0:name`): shards along the first dimension, or
    copies, which must be the same."""
    by_name: dict[str, list[np.ndarray]] = {}
    for item in sorted(held, key=lambda item: int(item.partition(":")[0].removeprefix("rank"))):
        by_name.setdefault(item.partition(":")[2], []).append(held[item])
    if size == -1:
        return {name: np.concatenate(parts) for name, parts in by_name.items()}
    if unequal := [
        name for name, parts in by_name.items() if any(part.tobytes() != parts[0].tobytes() for part in parts)
    ]:
        raise SystemExit(f"copies of {', '.join(unequal)} differ between ranks")
    return {name: parts[0] for name, parts in by_name.items()}


def sizes_at(number: int) -> dict[str, int]:
    """Return the `fsdp_size` of each model in a step of the run that changes."""
    sizes = {"actor": -1, "critic": -1}
    for step, changed in SCHEDULE.items():
        sizes |= changed if step <= number else {}
    return sizes


def findings(home: Path, plain: Finished, switched: Finished) -> Iterator[tuple[int, Finding]]:
    """Yield every comparison of every step, with the step's number."""
    for number in range(1, STEPS + 1):
        left = step_of(home, plain, number, {"actor": -1, "critic": -1})
        right = step_of(home, switched, number, sizes_at(number))
        # A step after a change is compared like a later step, not like a first one: its rounding has gone through
        # updates.
        for finding in step_findings(number, left, right, None if number < FIRST else STREAMING):
            yield number, finding


def report(plain: Finished, switched: Finished, found: list[tuple[int, Finding]]) -> dict:
    """Return the benchmark's JSON line; differences are the largest absolute differences from the first change on."""
    moved = {number: metrics[MOVED] for number, metrics in switched.metrics.items() if metrics.get(CHANGED)}
    later = [finding for number, finding in found if number >= FIRST]
    faults = [f"step {number}: {finding}" for number, finding in found if not finding.passed]
    if sorted(moved) != [step - 1 for step in SCHEDULE]:
        faults.append(f"layouts changed at the end of steps {sorted(moved)}")
    # Ranks with whole copies lack no part of their shards.
    if [step for step, moving in moved.items() if moving] != [FIRST - 1]:
        faults.append(f"bytes moved at the end of steps: {moved}")
    return {
        "bench": "switched",
        "steps": STEPS,
        "changed_before_steps": list(SCHEDULE),
        "moved_bytes": moved,
        "compared": len(found),
        "losses": {
            name: {
                "unswitched": [plain.metrics[number][name] for number in range(1, STEPS + 1)],
                "switched": [switched.metrics[number][name] for number in range(1, STEPS + 1)],
            }
            for name in LOSSES
            if name in plain.metrics[1]
        },
        "largest_difference": {
            kind: max((finding.value for finding in later if finding.kind == kind), default=None)
            for kind in ("numbers", "metrics")
        },
        "faults": faults,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        train(home, "recorded")
        plain, switched = train(home, "plain"), train(home, "switched", *SWITCHED)
        line = report(plain, switched, list(findings(home, plain, switched)))
    print(json.dumps(line))
    sys.exit(bool(line["faults"]))


if __name__ == "__main__":
    main()
