"""This external module for verl runs (VERL_USE_EXTERNAL_MODULES) saves the numbers of every step, in stock and fused
runs alike.

The driver notes when a step begins (begins.jsonl) and, before each actor update, saves the batch's numbers row by row
(batch_STEP.pt); after each update every rank saves its parameters (ROLE_STEP_rankR.pt). Files go to $STEP_RECORD_DIR.
"""

import functools
import json
import os
import time
from pathlib import Path

from verl_fuse.host.upstream.on_import import on_import

FIELDS = ["responses", "old_log_probs", "ref_log_prob", "values", "advantages", "returns", "rm_scores", "response_mask"]


def _folder():
    folder = Path(os.environ["STEP_RECORD_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save(name, data):
    import torch

    torch.save(data, _folder() / name)


def _record_trainer(module):
    _record_begins(module.PPOTrainer)
    _record_batches(module.PPOTrainer)


def _record_begins(cls):
    """Note the begin of each step: verl's own timer of a step leaves out the work between two steps (metrics, logging,
    observers)."""
    stock = cls.on_step_begin

    @functools.wraps(stock)
    def on_step_begin(self):
        with (_folder() / "begins.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.global_steps, "time": time.time()}) + "\n")
        return stock(self)

    cls.on_step_begin = on_step_begin


def _record_batches(cls):
    import transfer_queue as tq

    stock = cls._update_actor

    @functools.wraps(stock)
    def update_actor(self, batch, metrics):
        # Without a critic there are no values. A field that is missing by mistake shows in the comparison.
        fields = [field for field in FIELDS if self.use_critic or field != "values"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {field: [row.clone() for row in data[field].unbind()] for field in fields}
        padding = [bool(tag.get("is_padding")) for tag in batch.tags]
        _save(f"batch_{self.global_steps}.pt", {"padding": padding, "rows": rows})
        return stock(self, batch, metrics)

    cls._update_actor = update_actor


def _record_parameters(module):
    _seed_value_head(module.TrainingWorker)
    _wrap(module.ActorRolloutRefWorker, "update_actor", lambda worker: worker.actor.engine.module, "actor")
    _wrap(module.TrainingWorker, "train_mini_batch", lambda worker: worker.engine.module, "critic")


def _seed_value_head(cls):
    """Seed the critic's new value head, in every run alike: verl draws the head from an unseeded generator, by which
    two stock runs differ."""
    stock = cls.reset

    @functools.wraps(stock)
    def reset(self, *args, **kwargs):
        import torch

        torch.manual_seed(0)
        return stock(self, *args, **kwargs)

    cls.reset = reset


def _wrap(cls, method, model, role):
    stock = getattr(cls, method)
    count = {}

    @functools.wraps(stock)
    def run(self, *args, **kwargs):
        result = stock(self, *args, **kwargs)
        if role == "critic" and self.config.model_type != "value_model":
            return result
        step = count[id(self)] = count.get(id(self), 0) + 1
        local = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model(self).named_parameters()}
        _save(f"{role}_{step}_rank{os.environ.get('RANK', '0')}.pt", local)
        return result

    setattr(cls, method, run)


on_import("verl.trainer.ppo.v1.trainer_base", _record_trainer)
on_import("verl.workers.engine_workers", _record_parameters)
