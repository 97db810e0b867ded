"""Measure forward passes and seconds of the rollout of real GRPO runs, without drafts and with drafts from history.

Runs of the recipe grpo-cpu with real vLLM on two replicas, in turn: without drafts (the trainer and poll interval are
the same) and with. A step generates 8 samples of each of 16 prompts, the same in every step, so a step is an epoch; the
model trains. A validation warms the engines up. Ratios are of sums over all runs and epochs (passes, tail: ours over
stock; seconds: stock over ours), intervals a bootstrap over epochs (95 %). Passes are counted in the engines. The tail:
passes of a replica after the last with more than a quarter of the most requests it ran at once.

    python -m ci.bench.speculation [--rounds 3] [--epochs 8] [--tasks learned] [--keep DIRECTORY]
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.step import LAYERS, TASK
from ci.bench.support.runs import ARMS_FOLDER, in_folder, launch, parser, ratio
from verl_fuse.spec.timeline import GENERATION, Timeline
from verl_fuse_cpu.task.make import make
from verl_fuse_cpu.task.parameters import Parameters, WarmStart
from verl_fuse_speculation.passes import TAIL_SHARE

PROMPTS, SAMPLES = 16, 8
# The first is the task of the bench `step`, whose rollouts mostly decode. The second has the recipes' model, of which
# less was learned: short responses, less predictable.
TASKS = {
    "learned": replace(TASK, layers=LAYERS),
    "less predictable": Parameters(warm_start=WarmStart(250)),
}


def overrides(folder: Path, task: Path, epochs: int, drafts: bool) -> list[str]:
    return [
        f"task_dir={task}",
        f"data.train_max_samples={PROMPTS}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "data.shuffle=false",
        "data.val_max_samples=16",
        f"fuse.speculation.enabled={str(drafts).lower()}",
        "fuse.observe.progress=false",
        "fuse.observe.perfetto=false",
        "fuse.observe.html=false",
        f"trainer.total_training_steps={epochs}",
        f"trainer.total_epochs={epochs}",
        "trainer.val_before_train=true",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def run(folder: Path, task: Path, epochs: int, drafts: bool) -> list[dict[str, Any]]:
    """Return the cost of every epoch of one run."""
    folder.mkdir()
    settings = overrides(folder, task, epochs, drafts)
    launch(folder, "speculation_arms", settings, folder / "run.log", recipe="grpo-cpu", SPECULATION_BENCH=str(folder))
    return [measured(folder, step) for step in range(1, epochs + 1)]


def measured(folder: Path, step: int) -> dict[str, Any]:
    """Return the measurements of one epoch: passes of both replicas, passes of their tails, seconds of generation, and
    verl's logged figures."""
    sys.path.insert(0, str(ARMS_FOLDER))
    from speculation_arms import PASS

    timeline = Timeline.from_json((folder / f"run/timeline/step_{step:06d}.json").read_text())
    (generation,) = (span for span in timeline.spans if span.name == GENERATION)
    passes, tail = 0, 0
    for path in folder.glob("*.counted"):
        counted = np.array(list(PASS.iter_unpack(path.read_bytes())))
        here = counted[(counted[:, 0] >= generation.start) & (counted[:, 0] <= generation.end), 1]
        busy = np.flatnonzero(here > TAIL_SHARE * here.max(initial=0))
        passes, tail = passes + len(here), tail + len(here) - (busy[-1] + 1 if len(busy) else 0)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (logged,) = (line["data"] for line in lines if line["step"] == step and "fuse/samples_trained" in line["data"])
    return {
        "epoch": step,
        "passes": passes,
        "tail": int(tail),
        "seconds": generation.end - generation.start,
        "acceptance": logged.get("fuse/speculation_acceptance"),
        "entropy": logged["actor/entropy"],
        "lost": logged["fuse/samples_missing"],
        "tokens": logged["response_length/mean"] * PROMPTS * SAMPLES,
        "gap": logged["training/rollout_probs_diff_max"],
    }


def column(epochs: Sequence[dict[str, Any]], what: str) -> list[float]:
    return [epoch[what] for epoch in epochs]


def total(epochs: Sequence[dict[str, Any]], what: str) -> float:
    return sum(column(epochs, what))


def report(stock: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = [[epoch for epoch in epochs if epoch["epoch"] == 1] for epochs in (stock, ours)]
    numbers = sorted({epoch["epoch"] for epoch in ours})
    accepted = [np.mean([epoch["acceptance"] for epoch in ours if epoch["epoch"] == number]) for number in numbers]
    return {
        "epochs": len(ours),
        "passes_ratio": round(total(ours, "passes") / total(stock, "passes"), 3),
        "passes_interval": ratio(column(ours, "passes"), column(stock, "passes"))[1],
        "first_epoch_passes_ratio": round(total(first[1], "passes") / total(first[0], "passes"), 3),
        "tail_passes_ratio": round(total(ours, "tail") / total(stock, "tail"), 3),
        "rollout_seconds_ratio": round(total(stock, "seconds") / total(ours, "seconds"), 3),
        "interval": ratio(column(stock, "seconds"), column(ours, "seconds"))[1],
        "tokens_ratio": round(total(ours, "tokens") / total(stock, "tokens"), 3),
        "acceptance": [round(float(share), 3) for share in accepted],
        "entropy": round(float(np.mean([epoch["entropy"] for epoch in (*stock, *ours)])), 3),
        "rollout_probs_diff_max": max(epoch["gap"] for epoch in ours),
        "lost": int(total(stock, "lost") + total(ours, "lost")),
    }


def bench(folder: Path, task: str, rounds: int, epochs: int) -> dict[str, Any]:
    home = folder / f"task {task}"
    make(home, TASKS[task], say=lambda line: print(line, file=sys.stderr))
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(rounds):
        # Each goes first as often as the other.
        for drafts in (False, True) if number % 2 == 0 else (True, False):
            found[drafts] += run(folder / f"{task} {number} {'ours' if drafts else 'stock'}", home, epochs, drafts)
    (folder / f"{task}.json").write_text(json.dumps({"stock": found[False], "ours": found[True]}))
    return report(found[False], found[True])


def bench_all(folder: Path, tasks: Sequence[str], rounds: int, epochs: int) -> dict[str, Any]:
    found = {task: bench(folder, task, rounds, epochs) for task in tasks}
    first, *others = found
    return {"bench": "speculation", "task": first, **found[first], **{task: found[task] for task in others}}


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=8)
    arguments.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    given = arguments.parse_args()
    in_folder(given.keep, lambda folder: bench_all(folder, given.tasks, given.rounds, given.epochs), again=True)


if __name__ == "__main__":
    main()
