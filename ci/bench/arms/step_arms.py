"""This external module of the bench `step` (VERL_USE_EXTERNAL_MODULES), the same in every run, measures whole steps of
verl's own trainers or of verl-fuse's.

- Seconds of a step are from its begin until its metrics are there, without a validation: weight sync, accounts and
  timelines included.
- verl's own trainers look at the rollout at verl-fuse's pace (host/rollout/watch.py), and are otherwise unchanged.
- With STEP_BENCH_UNSHARED prompts are computed for each sample, by the code that computes them once.
- Replica, rank and slice of the same number are pinned to one core, and so is a critic with devices of its own.
"""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from pinning import pin_ranks, pin_replicas

from verl_fuse.host.upstream.on_import import on_import

# verl's timer of a validation.
VALIDATION = "testing"
# Groups that verl's asynchronous trainer discards before a step: too old, or failed.
EVICTED = ("training/off_policy/evicted_samples", "training/rollout_failure/evicted_samples")


def _pin_devices(trainer: Any) -> None:
    from omegaconf import OmegaConf

    slices = [part._slices for part in getattr(trainer, "parts", ()) if hasattr(part, "_slices")]
    cores = pin_replicas(trainer)
    pin_ranks([trainer.actor_rollout_wg], cores)
    if trainer.use_critic:
        first = OmegaConf.select(trainer.config, "fuse.placement.critic.first") or 0
        pin_ranks([trainer.critic_wg], cores[first:])
    for number, group in enumerate(group for part in slices for group in part._groups):
        pin_ranks([group], cores[number:])


def _record(batch: Any, metrics: dict, trainer: Any, seconds: float) -> dict[str, Any]:
    from verl_fuse.spec.trajectory import TrajectoryKey

    rows = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    sessions = {TrajectoryKey.parse(key).sample for key, _ in rows}
    config = trainer.config
    return {
        "step": trainer.global_steps,
        "seconds": seconds,
        "at": time.monotonic(),
        "parts": {
            name: spent
            for name, spent in trainer.timing_raw.items()
            if "/" not in name and name not in {"step", VALIDATION}
        },
        "samples": len(sessions),
        "lost": config.data.train_batch_size * config.actor_rollout_ref.rollout.n - len(sessions),
        "duplicated": len(rows) - len({key for key, _ in rows}),
        "tokens": sum(int(tag["response_len"]) for _, tag in rows),
        "prompt_tokens": sum(int(tag["prompt_len"]) for _, tag in rows),
        "prompt_lengths": [int(tag["prompt_len"]) for _, tag in rows],
        "response_lengths": [int(tag["response_len"]) for _, tag in rows],
        "cut_off": sum(int(tag["response_len"]) >= config.data.max_response_length for _, tag in rows),
        "score": metrics["critic/score/mean"],
        # A step without a sample to compute has no entropy of its own.
        "entropy": metrics.get("actor/entropy"),
        "staleness": float(metrics["training/off_policy/trajectory_staleness_worst/mean"]),
        "evicted": config.actor_rollout_ref.rollout.n * sum(int(metrics.get(name, 0)) for name in EVICTED),
        "own": {name: value for name, value in metrics.items() if name.startswith("fuse/")},
    }


def _measure_steps(trainer: Any) -> None:
    _pin_devices(trainer)
    begin, end = trainer.on_step_begin, trainer._compute_metrics
    begun = 0.0

    def on_step_begin() -> None:
        nonlocal begun
        begun = time.monotonic()
        begin()

    def _compute_metrics(batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        end(batch, metrics, *args, **kwargs)
        seconds = time.monotonic() - begun - trainer.timing_raw.get(VALIDATION, 0.0)
        record = _record(batch, metrics, trainer, seconds)
        with Path(os.environ["STEP_BENCH"]).open("a") as file:
            file.write(json.dumps(record) + "\n")

    trainer.on_step_begin, trainer._compute_metrics = on_step_begin, _compute_metrics


def _measured(module: Any) -> None:
    trainer = module.PPOTrainer
    build = trainer._build_replay_buffer

    @functools.wraps(build)
    def _build_replay_buffer(self: Any) -> Any:
        buffer, train = build(self), self.on_train_begin

        # The instance's: verl's asynchronous trainer has a method of its own, which does not call its parent's.
        def on_train_begin() -> None:
            train()
            _measure_steps(self)

        self.on_train_begin = on_train_begin
        if self.config.trainer.v1.trainer_mode != "fuse":
            from verl_fuse.host.rollout.watch import RolloutWatch
            from verl_fuse.host.start.settings import CoreBlock

            pace, stall = CoreBlock.poll_interval, CoreBlock.stall_timeout
            RolloutWatch(buffer, pace, stall)
        return buffer

    trainer._build_replay_buffer = _build_replay_buffer


def _unshared(module: Any) -> None:
    """Let rows that have the same prompt pass for rows of different ones, in workers and in their placement."""
    import torch

    stock = module.prompt_groups

    def alone(data: Any) -> Any:
        found = stock(data)
        found[:, 0] = torch.arange(len(found))
        return found

    module.prompt_groups = alone


def _placed_alone(module: Any) -> None:
    module.prompts_of = lambda batch: None


on_import("verl.trainer.ppo.v1.trainer_base", _measured)
if "STEP_BENCH_UNSHARED" in os.environ:
    on_import("verl_fuse.host.sharing.engine", _unshared)
    on_import("verl_fuse_update.shared", _placed_alone)
