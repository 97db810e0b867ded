"""In this external module of the bench `update` (VERL_USE_EXTERNAL_MODULES) each step runs one arm, in one process with
the same worker groups.

- stock: verl's own pass and update, on workers that leave nothing out;
- skip_zero_gradient, skip_old_log_prob: one switch, with verl's metrics;
- all: both, with metrics of the computed samples.

A step's seconds are from its begin to the end of its weight sync. In the warm-up, a step of `all` is updated by verl as
well, from the same weights.
"""

import functools
import importlib
import json
import time
from pathlib import Path
from typing import Any

from bench_plan import arm, group, plan
from kept_actor import differences, keep, on_workers, undo
from pinning import pin_ranks, pin_replicas

from verl_fuse.host.upstream.on_import import on_import

OPTIONS: dict[str, dict[str, Any]] = {
    "stock": {},
    "skip_zero_gradient": {"skip_zero_gradient": True},
    "skip_old_log_prob": {"skip_old_log_prob": True},
    "all": {"skip_zero_gradient": True, "skip_old_log_prob": True, "metrics": "computed"},
}


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("forced_reward_agent")


def _switch_arms(module: Any) -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from verl_fuse_update.lean.driver import LeanUpdates
    from verl_fuse_update.lean.options import LeanOptions

    trainer: Any = module.FuseTrainer
    stock: Any = PPOTrainerSync
    begin, end, old, update = (
        trainer.on_step_begin,
        trainer.on_step_end,
        trainer._compute_old_log_prob,
        trainer._update_actor,
    )

    def on_step_begin(self: Any) -> None:
        if self.global_steps == 1:
            pin_ranks([self.actor_rollout_wg], pin_replicas(self))
        self.parts[:] = [LeanUpdates(self, self.run_stage, LeanOptions(**OPTIONS[arm(self.global_steps)]))]
        self._seconds = {"begin": time.monotonic()}
        begin(self)

    def timed(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def stage(self: Any, batch: Any, metrics: dict) -> Any:
            begun = time.monotonic()
            batch = method(self, batch, metrics)
            self._seconds[name] = time.monotonic() - begun
            return batch

        return stage

    def _update_actor(self: Any, batch: Any, metrics: dict) -> Any:
        compared = group(self.global_steps) == 0 and arm(self.global_steps) == "all"
        if compared:
            from dataclasses import replace

            # The copy has all fields: the batch does not name the fields that verl's pass leaves.
            copy = replace(batch, fields=None, extra_info=dict(batch.extra_info or {}))
            stock._compute_old_log_prob(self, copy, {})
            on_workers(self, keep)
            stock._update_actor(self, copy, {})
            on_workers(self, undo)
        batch = update(self, batch, metrics)
        if compared:
            self._seconds["difference"] = max(max(found.values()) for found in on_workers(self, differences))
        return batch

    def on_step_end(self: Any) -> None:
        end(self)
        seconds, account = self._seconds, self.journal.step.account
        record = {
            "step": self.global_steps,
            "arm": arm(self.global_steps),
            "seconds": time.monotonic() - seconds.pop("begin"),
            "samples": account.samples,
            "lost": account.missing,
            "skipped_tokens": self.parts[0].metrics["fuse/update_skipped_tokens"],
            **seconds,
        }
        with Path(plan()["measurements"]).open("a") as file:
            file.write(json.dumps(record) + "\n")

    trainer.on_step_begin, trainer.on_step_end = on_step_begin, on_step_end
    trainer._compute_old_log_prob = timed("old_log_prob", old)
    trainer._update_actor = timed("update", _update_actor)


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl_fuse.host.trainer", _switch_arms)
