"""Runs shipped recipes through `verl-fuse run`, as a user would, and reads back what they left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
# Small enough to end in about a minute and a half, and still with two ranks, two replicas, two mini-batches and padding to come.
SMALL = (
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)
SMALL_CRITIC = (
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.forward_micro_batch_size_per_gpu=4",
)


@dataclass(frozen=True)
class Finished:
    """A run that ended: exit code, everything it printed, and its directory."""

    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """What verl logged, by step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}

    def accounts(self) -> dict[int, dict]:
        """The sample accounts, by step."""
        files = sorted((self.folder / "accounts").glob("step_*.json"))
        return {account["step"]: account for account in (json.loads(file.read_text()) for file in files)}


def run(
    home: Path,
    recipe: str,
    *overrides: str,
    name: str,
    experiment: str | None = None,
    baseline: bool = False,
    record: Path | None = None,
    fault: str = "",
    stop_when: Callable[[Path], bool] | None = None,
    timeout: float = 1200,
) -> Finished:
    """Run a recipe in `home/name`, as experiment `experiment` (default: `name`).

    `record` saves every step's numbers there (support/step_recorder.py), with `fault` planted; `stop_when(folder)` is polled, and once it
    is true the run is told to stop (SIGTERM).
    """
    folder = home / name
    log = home / f"{name}.{time.time_ns()}.log"
    environment = {**os.environ, "VERL_FUSE_HOME": str(home)}
    if record is not None:
        environment |= {
            "VERL_USE_EXTERNAL_MODULES": "step_recorder",
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            "STEP_RECORD_DIR": str(record),
            "STEP_RECORD_BREAK": fault,
        }
    command = [str(Path(sys.executable).with_name("verl-fuse")), "run", recipe, *(["--baseline"] if baseline else [])]
    command += [*overrides, f"trainer.experiment_name={experiment or name}", f"trainer.default_local_dir={folder}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=home
        )
        try:
            _wait(process, folder, stop_when, timeout)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
    return Finished(process.returncode, log.read_text(errors="replace"), folder)


def _wait(process: subprocess.Popen, folder: Path, stop_when: Callable[[Path], bool] | None, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{process.args} did not end in {timeout} s")
        if stop_when is not None and stop_when(folder):
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            return
        time.sleep(0.2)
