"""Compares whole steps of stock verl with verl-fuse on one device: GRPO, a model of random weights, vLLM.

    python -m ci.gpu.whole --out FOLDER [--device cpu] [--arms stock fast] [--steps 5] [--prompts 32] [overrides ...]

- Each arm is a run of `python -m verl.trainer.main_ppo` of its own: `stock` is verl's trainer without this package,
  any other name (up to a `-`) a value of `fuse.preset`, or `observe`. Arms start together and then take turns, a step
  each (`turns.py`), so that what the machine does at a time falls on all of them.
- A step is from the moment it gets its batch until it asks for the next one: all that verl does in between. The first
  step of an arm, which compiles and allocates, is left out.
- An arm that fails ends alone; the table and FOLDER/whole.json tell of the others, and the exit code is 1. It is 1,
  too, where verl-fuse did not train each sample of a step once.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from ci.gpu.machine import DEVICES, Report, require_device
from ci.gpu.whole import made
from ci.gpu.whole.made import ROOT
from verl_fuse.errors import FuseError
from verl_fuse_cpu.environment import environment

STOCK, OBSERVE = "stock", "observe"
STAGES = ("gen", "old_log_prob", "update_actor", "update_weights")
# What the report keeps of a step.
METRICS = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_loss",
    "actor/ppo_kl",
    "actor/perf/max_memory_allocated_gb",
    "fuse/samples_missing",
    "fuse/samples_trained",
    "fuse/update_skipped_samples",
    "fuse/update_skipped_tokens",
    "perf/mfu/actor",
    "perf/total_num_tokens",
    "response_length/mean",
    "training/rollout_probs_diff_max",
)
SAMPLES = 8
REFUSED = 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of a step; a device's memory is parted between the arms, which all keep their models in it."""

    model: str
    prompts: int
    prompt: int
    response: int
    tokens: int
    kv_bytes: int
    memory: float


SIZES_OF = {
    "cuda": Sizes("1.5b", 32, 200, 2048, 8192, 4 << 30, 0.12),
    "cpu": Sizes("tiny", 8, 20, 32, 512, 64 << 20, 0.1),
}


def overrides(arm: str, folder: Path, device: str, steps: int, sizes: Sizes) -> list[str]:
    """Return the command line of an arm, after verl's defaults."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    preset = arm.split("-")[0]
    ours = ["+fuse=default", "trainer.v1.trainer_mode=fuse"]
    ours += [] if preset == OBSERVE else [f"fuse.preset={preset}"]
    found = [
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.custom_cls.path={ROOT}/ci/gpu/whole/turns.py",
        "data.custom_cls.name=TurnsDataset",
        f"data.train_batch_size={sizes.prompts}",
        f"data.max_prompt_length={sizes.prompt}",
        f"data.max_response_length={sizes.response}",
        "data.dataloader_num_workers=0",
        "data.seed=0",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr=1e-8",
        f"{actor}.ppo_mini_batch_size={sizes.prompts}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={sizes.tokens}",
        f"{actor}.use_kl_loss=false",
        f"{rollout}.name=vllm",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={sizes.memory}",
        f"++{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={sizes.kv_bytes}",
        f"{rollout}.max_num_batched_tokens=8192",
        f"{rollout}.max_num_seqs={sizes.prompts * SAMPLES}",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{rollout}.log_prob_max_token_len_per_gpu={sizes.tokens}",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.num_workers=2",
        f"reward.custom_reward_function.path={made.__file__}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        "trainer.project_name=whole",
        f"trainer.experiment_name={arm}",
        f"trainer.default_local_dir={folder}/{arm}/run",
        f"hydra.run.dir={folder}/{arm}/hydra",
        "+ray_kwargs.ray_init.include_dashboard=false" if device == "cuda" else "trainer.device=cpu",
        *(ours if arm != STOCK else ["trainer.v1.trainer_mode=sync"]),
    ]
    if device == "cpu":
        platform = f"hydra.searchpath=[file://{ROOT}/plugins/verl_fuse_cpu/config]"
        found += [platform, "+platform@_global_=cpu", "actor_rollout_ref.model.use_remove_padding=false"]
    return found


def start(
    arm: str, arms: Sequence[str], folder: Path, given: Sequence[str], prompts: int, device: str
) -> subprocess.Popen[bytes]:
    """Start an arm; it writes its log and verl's metrics into a folder of its own."""
    (folder / arm).mkdir(parents=True, exist_ok=True)
    variables = {
        "ARM": arm,
        "ARMS": ",".join(arms),
        "PROMPTS": str(prompts),
        "TURNS": str(folder),
        "VERL_FILE_LOGGER_PATH": str(folder / arm / "metrics.jsonl"),
        "VLLM_NO_USAGE_STATS": "1",
        # A machine without flashinfer samples with vLLM's own kernels.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **(environment() if device == "cpu" else {}),
    }
    # A run that ends says so, however it ended: the others wait for it otherwise.
    command = ["sh", "-c", '"$@"; code=$?; touch "$TURNS/$ARM.ended"; exit $code', "sh"]
    command += [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    with (folder / arm / "run.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)


def figures(folder: Path, arm: str) -> dict[str, Any]:
    """Return the seconds and metrics of each step that an arm finished."""
    metrics, turns = folder / arm / "metrics.jsonl", folder / f"{arm}.turns"
    told = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    times = [line.split() for line in turns.read_text().splitlines()] if turns.exists() else []
    begins, ends = ([float(at) for kind, at in times if kind == wanted] for wanted in ("begin", "end"))
    return {
        "seconds": [round(end - begin, 3) for begin, end in zip(begins, ends, strict=False)],
        "stages": [{stage: step.get(f"timing_s/{stage}") for stage in STAGES} for step in told],
        "metrics": [{name: step[name] for name in METRICS if name in step} for step in told],
    }


def ratio(base: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the seconds of an arm over those of the first arm, of the steps after the first that both made."""
    both = list(zip(base[1:], seconds[1:], strict=False))
    return sum(own for _, own in both) / sum(first for first, _ in both) if both else None


def faults(found: Mapping[str, Mapping[str, Any]], codes: Mapping[str, int], samples: int) -> list[str]:
    """Return the arms that failed, and the steps in which verl-fuse did not train each sample once."""
    wrong = [f"{arm}: exit code {code}" for arm, code in codes.items() if code]
    for arm, each in found.items():
        for number, step in enumerate(each["metrics"], 1):
            trained, missing = step.get("fuse/samples_trained", samples), step.get("fuse/samples_missing", 0)
            if (trained, missing) != (samples, 0):
                wrong.append(f"{arm}, step {number}: {trained:.0f} of {samples} samples trained, {missing:.0f} missing")
    return wrong


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return mean seconds of the steps after the first, and the ratio to the first arm's."""
    lines = [f"{'arm':16} {'steps':>5} {'whole':>8} {'ratio':>6} " + " ".join(f"{stage:>14}" for stage in STAGES)]
    base = next(iter(found.values()))["seconds"]
    for arm, each in found.items():
        seconds, stages = each["seconds"][1:], each["stages"][1 : len(each["seconds"])]
        if not seconds:
            lines.append(f"{arm:16}     0")
            continue
        means = " ".join(f"{mean(stage_of[stage] or 0.0 for stage_of in stages):14.3f}" for stage in STAGES)
        own = ratio(base, each["seconds"])
        compared = "     -" if own is None else f"{own:6.3f}"
        lines.append(f"{arm:16} {len(seconds):5} {mean(seconds):8.2f} {compared} {means}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.whole", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, and of the report whole.json")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--arms", nargs="+", default=[STOCK, "fast"])
    parser.add_argument("--steps", type=int, default=5, help="the last one is not measured")
    parser.add_argument("--wait", action="store_true", help="take the first turn when FOLDER/begin is made")
    parser.add_argument("overrides", nargs="*", help="of all arms; ARM:KEY=VALUE is of one arm")
    options = parser.parse_args(arguments)
    try:
        require_device(options.device)
    except FuseError as error:
        print(f"ci.gpu.whole: {error}", file=sys.stderr)
        return REFUSED
    folder, sizes, begun = options.out.absolute(), SIZES_OF[options.device], time.monotonic()
    (folder / "model").mkdir(parents=True, exist_ok=True)
    if not options.wait:
        (folder / "begin").touch()
    # A process of its own gives the device's memory back.
    if not (folder / "model" / "model.safetensors").exists():
        making = [sys.executable, "-m", "ci.gpu.whole.made", str(folder), "--size", sizes.model]
        making += ["--prompts", str(sizes.prompts * 2), "--tokens", str(sizes.prompt), "--device", options.device]
        subprocess.run(making, check=True)
    runs = {}
    for arm in options.arms:
        own = [each.removeprefix(f"{arm}:") for each in options.overrides if _is_of(each, arm, options.arms)]
        given = overrides(arm, folder, options.device, options.steps, sizes)
        runs[arm] = start(arm, options.arms, folder, [*given, *own], sizes.prompts, options.device)
    codes = {arm: run.wait() for arm, run in runs.items()}
    found = {arm: figures(folder, arm) for arm in options.arms}
    wrong = faults(found, codes, sizes.prompts * SAMPLES)
    ratios = {arm: ratio(found[options.arms[0]]["seconds"], each["seconds"]) for arm, each in found.items()}
    result = {"sizes": asdict(sizes), "overrides": options.overrides, "arms": found, "ratios": ratios, "faults": wrong}
    Report.of("whole", options.device, time.monotonic() - begun, result).write(folder / "whole.json")
    print(table(found))
    for fault in wrong:
        print(f"ci.gpu.whole: {fault}; its log is {folder}/ARM/run.log", file=sys.stderr)
    return 1 if wrong else 0


def _is_of(override: str, arm: str, arms: Sequence[str]) -> bool:
    owner = override.split(":", 1)[0]
    return owner == arm or owner not in arms


if __name__ == "__main__":
    sys.exit(main())
