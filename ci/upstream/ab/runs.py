"""Run a recipe in one environment by verl's own entry point, and watch the run until all its processes have ended."""

import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ci.upstream.ab.environments import Environment
from ci.upstream.ab.record import LOG, METRICS, NUMBERS, Record, read
from verl_fuse.cli import child
from verl_fuse.cli.recipes import Recipe
from verl_fuse.cli.run import BASELINE, HOME_VARIABLE
from verl_fuse.cli.run import METRICS_PATH_VARIABLE as METRICS_VARIABLE
from verl_fuse_cpu.environment import environment as cpu_environment

# The external module saves the numbers of every step; runs find the module through PYTHONPATH.
RECORDER = Path(__file__).parents[1] / "recorder"
# A run is small enough to end in about a minute and a half, and still has two ranks, two replicas, two mini-batches and
# padding.
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
# Steps whose rollouts are recorded once and replayed in every run: their numbers and times can be compared one by one.
REPLAYED = (1, 2, 3, 4, 5, 6)
# Steps that generate, after the replayed ones; the time of the last step is not known.
LIVE = 4
# Seconds between two looks at a run's memory, and until a run counts as hung.
LOOK = 2.0
TIMEOUT = 900.0


@dataclass(frozen=True)
class Bench:
    """The place of a recipe's runs: both environments, the folder of the runs and recordings, and the folder that holds
    the task."""

    stock: Environment
    fused: Environment
    recipe: Recipe
    folder: Path
    task_home: Path

    def run(self, name: str, extra: tuple[str, ...] = (), *, stock: bool, installed: bool, steps: int) -> Record:
        """Train `steps` steps in `folder`/NAME as stock verl or in trainer mode `fuse`, with verl-fuse installed or
        not."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        environment = self.fused if installed else self.stock
        command = [str(environment.python), "-P", "-m", "verl.trainer.main_ppo"]
        command += ["--config-path", str(self.recipe.folder), "--config-name", "config"]
        command += [*(BASELINE if stock else ()), *self.overrides(folder, steps), *extra]
        variables = {
            **os.environ,
            **cpu_environment(),
            HOME_VARIABLE: str(self.task_home),
            METRICS_VARIABLE: str(folder / METRICS),
            "VERL_USE_EXTERNAL_MODULES": "step_recorder",
            "VERL_USE_EXTERNAL_PLUGINS": "auto",
            "STEP_RECORD_DIR": str(folder / NUMBERS),
            "PYTHONPATH": str(RECORDER),
        }
        with (folder / LOG).open("wb") as output:
            code, peak = watch(command, variables, folder, output)
        return read(name, code, peak, folder, REPLAYED)

    def overrides(self, folder: Path, steps: int) -> tuple[str, ...]:
        """Return the settings of all runs: small batches, the recipe's seeds, and rollouts recorded once."""
        return (
            *SMALL,
            *(SMALL_CRITIC if self.recipe.algorithm == "PPO" else ()),
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            "trainer.logger=[file]",
            "skip.rollout_tq.enable=true",
            f"skip.rollout_tq.steps=[{','.join(map(str, REPLAYED))}]",
            f"skip.rollout_tq.dump_dir={self.folder}/rollouts",
            # verl files recorded rollouts by experiment name: one name for all runs, a folder for each.
            f"trainer.experiment_name={self.recipe.name}",
            f"trainer.default_local_dir={folder}",
        )


def watch(command: list[str], variables: Mapping[str, str], folder: Path, output: IO[bytes]) -> tuple[int | None, int]:
    """Return the exit code (None after TIMEOUT) and the peak memory of a command and of all processes that the command
    starts; end every process that is left."""
    run_id = uuid.uuid4().hex
    deadline = time.monotonic() + TIMEOUT
    peak = 0
    process = subprocess.Popen(
        command,
        env={**variables, child.RUN_ID_VARIABLE: run_id},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        process_group=0,
    )
    try:
        while process.poll() is None and time.monotonic() < deadline:
            peak = max(peak, sum(map(memory, child.processes(run_id))))
            time.sleep(LOOK)
        return process.poll(), peak
    finally:
        if process.poll() is None:
            process.terminate()
        child.end_processes(run_id)
        process.wait()


def memory(pid: int) -> int:
    """Return the bytes of memory that a process holds, where a shared page counts in equal parts for its processes
    (PSS); 0 once the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
