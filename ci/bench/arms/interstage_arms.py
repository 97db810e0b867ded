"""In this external module of the bench's run (VERL_USE_EXTERNAL_MODULES) each step runs one arm, in one process with
the same worker groups.

- stock: verl's own stage methods on its own worker groups; no hook is called, no slice gets weights;
- control: inference on slices, in one call per micro-group, after generation;
- fused: the tail migrates, freed replicas' slices run inference meanwhile.

A step's seconds are from its begin to its advantages. Slices get their weights at the begin of the steps that use
slices, so that exactly these steps pay for the weights. All arms look at the rollout equally often.
"""

import functools
import importlib
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench_plan import arm, length, plan
from pinning import pin, pin_ranks, pin_replicas

from verl_fuse.host.upstream.on_import import on_import

STAGES = ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values")


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("heavy_tail_agent")


def _cpu_seconds() -> Counter[str]:
    """Return the CPU seconds of every process of this machine so far, by the name of its program."""
    spent: Counter[str] = Counter()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        name = re.split(r"[. (]", command.rpartition("/")[2].removeprefix("ray::"))[0]
        spent[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _pin_devices(trainer: Any) -> None:
    """Give each device one core: replica, slice and training rank of the same number share the core."""
    import ray

    cores = pin_replicas(trainer)
    for number, group in enumerate(_refresh(trainer)._slices._groups):
        pin(ray.get([w.__ray_call__.remote(lambda _: os.getpid()) for w in group.workers]), cores[number])
    pin_ranks((trainer.actor_rollout_wg, trainer.critic_wg), cores)


def _refresh(trainer: Any) -> Any:
    (part,) = trainer.parts
    return part


def _switch_arms(module: Any) -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    fused: Any = module.FuseTrainer
    stock: Any = PPOTrainerSync
    begin, sampled, balance, advantage, end = (
        fused.on_step_begin,
        fused.on_sample_end,
        fused._balance_batch,
        fused._compute_advantage,
        fused.on_step_end,
    )

    def on_step_begin(self: Any) -> None:
        if self.global_steps == 1:
            _pin_devices(self)
            _refresh(self).before_weight_sync = _refresh(self).after_weight_sync = lambda step: None
            self._ask_migration, self._look = self.director.policy.migration, self.director.look
        self._arm = arm(self.global_steps)
        self.director.look = self._look if self._arm != "stock" else lambda watch: None
        self.director.policy.migration = self._ask_migration if self._arm == "fused" else lambda view: None
        self._marks = {"begin": time.monotonic()}
        if self._arm != "stock":
            _refresh(self)._refresh()
        self._marks["refreshed"] = time.monotonic()
        self._spent = _cpu_seconds()
        begin(self)

    def on_sample_end(self: Any) -> None:
        self._marks["generated"] = time.monotonic()
        self._spent = _cpu_seconds() - self._spent
        sampled(self)

    def _balance_batch(self: Any, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> Any:
        if self._arm != "stock":
            return balance(self, batch, metrics, *args, **kwargs)
        batch = stock._balance_batch(self, batch, metrics, *args, **kwargs)
        self.journal.account(self.settings.run_dir, batch, False, self.journal.step.expected())
        return batch

    def either(name: str) -> Any:
        ours, verls = getattr(fused, name), getattr(stock, name)

        @functools.wraps(ours)
        def stage(self: Any, batch: Any, metrics: dict) -> Any:
            return (verls if self._arm == "stock" else ours)(self, batch, metrics)

        return stage

    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        self._marks["inferred"] = time.monotonic()
        self._lengths = sorted(tag["response_len"] for tag in batch.tags if not tag.get("is_padding"))
        return advantage(self, batch, metrics)

    def on_step_end(self: Any) -> None:
        end(self)
        marks, step = self._marks, self.global_steps
        n = plan()["samples_per_prompt"]
        asked = sorted(length(step, sample // n, sample % n) for sample in range(self.journal.step.expected()))
        record = {
            "step": step,
            "arm": self._arm,
            "refresh": marks["refreshed"] - marks["begin"],
            "generation": marks["generated"] - marks["refreshed"],
            "inference": marks["inferred"] - marks["generated"],
            "seconds": marks["inferred"] - marks["begin"],
            "samples": self.journal.step.account.samples,
            "lost": self.journal.step.account.missing,
            "whole": self._lengths == asked,
            "generation_cpu": {name: round(spent, 2) for name, spent in self._spent.items() if spent >= 0.03},
        }
        with Path(plan()["measurements"]).open("a") as file:
            file.write(json.dumps(record) + "\n")

    for method in (on_step_begin, on_sample_end, _balance_batch, _compute_advantage, on_step_end):
        setattr(fused, method.__name__, method)
    for name in STAGES:
        setattr(fused, name, either(name))


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl_fuse.host.trainer", _switch_arms)
