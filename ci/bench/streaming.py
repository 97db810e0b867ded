"""Measure the seconds that observing and streaming cost or save on a CPU: the recipe ppo-cpu runs as stock verl,
observed, and with streaming inference.

Seconds are sums of generation and inference (a step less its updates, advantage and weight sync) over the same number
of steps of each run, the first step left out. Stock verl looks at the rollout every 2 s, verl-fuse every 0.05 s:
`observe` is the control that tells the shorter poll from the overlap. Runs are whole processes in random order, because
one process can only have one trainer mode.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from verl_fuse.spec.timeline import ADVANTAGE, TRAIN_STAGES, UPDATE_WEIGHTS

STEPS = 16
MODES = {
    "stock": ["--baseline"],
    "observe": [],
    "streaming": ["fuse.interstage.enabled=true"],
}
# The parts of a step that belong neither to generation nor to inference.
OTHER = (ADVANTAGE, *TRAIN_STAGES, UPDATE_WEIGHTS)


def run(home: Path, mode: str) -> dict[int, dict[str, float]]:
    """Train STEPS steps in one mode; return verl's metrics by step."""
    folder = home / mode
    overrides = [
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}",
    ]
    command = [str(Path(sys.executable).with_name("verl-fuse")), "run", "ppo-cpu", *MODES[mode], *overrides]
    log = home / f"{mode}.log"
    with log.open("wb") as output:
        environment = {**os.environ, "VERL_FUSE_HOME": str(home)}
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(f"{mode} ended with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["data"] for line in lines}


def generation_and_inference(steps: dict[int, dict[str, float]]) -> float:
    """Return the seconds of generation and inference over all steps but the first, which warms up."""
    counted = [data for step, data in steps.items() if step > 1]
    return sum(data["timing_s/step"] - sum(data[f"timing_s/{part}"] for part in OTHER) for data in counted)


def main() -> None:
    order = random.sample(list(MODES), len(MODES))
    with tempfile.TemporaryDirectory() as home:
        results = {mode: run(Path(home), mode) for mode in order}
    seconds = {mode: generation_and_inference(results[mode]) for mode in MODES}
    streamed = [data for step, data in results["streaming"].items() if step > 1]
    report = {
        "bench": "streaming",
        "steps": STEPS - 1,
        "order": order,
        **{f"{mode}_seconds": round(value, 2) for mode, value in seconds.items()},
        "stock_over_streaming": round(seconds["stock"] / seconds["streaming"], 3),
        "observe_over_streaming": round(seconds["observe"] / seconds["streaming"], 3),
        "overlap_seconds": round(sum(data["fuse/overlap_seconds"] for data in streamed), 2),
        "hidden_fraction": round(sum(data["fuse/overlap_fraction"] for data in streamed) / len(streamed), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
