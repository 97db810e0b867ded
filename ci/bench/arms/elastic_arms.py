"""In this external module of the bench `elastic` (VERL_USE_EXTERNAL_MODULES) each step runs one arm, in one process
with the same replicas.

- static: every replica generates, verl routes requests, nothing is given back before generation ends;
- elastic WEIGHT: the policies of fuse.elastic decide, at this cost weight;
- fixed COUNT: the same policies, but COUNT replicas generate.

All arms learn lengths and costs, and look at the rollout equally often.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from bench_plan import arm, length, plan
from pinning import pin_replicas

from verl_fuse.host.upstream.on_import import on_import

POLICIES = ("predict", "scale", "assign", "migration")


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("heavy_tail_agent")


def _switch_arms(module: Any) -> None:
    trainer: Any = module.FuseTrainer
    begin, end = trainer.on_step_begin, trainer._compute_metrics

    def on_step_begin(self: Any) -> None:
        if self.global_steps == 1:
            pin_replicas(self)
            self._asking = {name: getattr(self.director.policy, name) for name in POLICIES}
        kind, _, number = arm(self.global_steps).partition(" ")
        for name in POLICIES:
            setattr(self.director.policy, name, self._asking[name] if number else lambda *args: None)
        if kind == "fixed":
            self.director.policy.scale = lambda prompts, replicas, most: int(number)
        elif kind == "elastic":
            scaler = self.settings.manager.get_plugin("elastic")._run.scaler
            scaler._block = dataclasses.replace(scaler._block, cost_weight=float(number))
        begin(self)

    def _compute_metrics(self: Any, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        end(self, batch, metrics, *args, **kwargs)
        step, n = self.global_steps, plan()["samples_per_prompt"]
        asked = sorted(length(step, sample // n, sample % n) for sample in range(self.journal.step.expected))
        got = sorted(tag["response_len"] for tag in batch.tags if not tag.get("is_padding"))
        spent = {kind: metrics[f"fuse/device_seconds_{kind}"] for kind in ("busy", "idle", "parked")}
        record = {
            "step": step,
            "arm": arm(step),
            # All replicas together spend the whole of generation, planning before generation included.
            "seconds": sum(spent.values()) / len(self.llm_server_manager.get_replicas()),
            "replica_seconds": spent["busy"] + spent["idle"],
            "replicas": metrics["fuse/elastic_replicas"] if arm(step).startswith("elastic") else None,
            "predicted": metrics.get("fuse/elastic_predicted_seconds") if arm(step).startswith("elastic") else None,
            "moved": metrics["fuse/migrations"],
            "prefills": metrics["fuse/prefills_per_prompt_token"],
            "lost": self.journal.step.account.missing,
            "whole": got == asked,
            "fallbacks": metrics["fuse/fallbacks"],
        }
        with Path(plan()["measurements"]).open("a") as file:
            file.write(json.dumps(record) + "\n")

    trainer.on_step_begin, trainer._compute_metrics = on_step_begin, _compute_metrics


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl_fuse.host.trainer", _switch_arms)
