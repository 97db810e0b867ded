"""External module for test runs (VERL_USE_EXTERNAL_MODULES): saves what every step computed, in stock and fused runs alike.

Before each actor update the driver saves the batch's numbers row by row; after each update every rank saves the parameters it holds. Files go to $STEP_RECORD_DIR. `STEP_RECORD_BREAK` plants a fault, to show that the comparison can fail.
"""

import functools
import os
from pathlib import Path

from verl_fuse.host.on_import import on_import

FIELDS = ["responses", "old_log_probs", "ref_log_prob", "values", "advantages", "returns", "rm_scores", "response_mask"]


def _save(name, data):
    import torch

    folder = Path(os.environ["STEP_RECORD_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(data, folder / name)


def _record_batches(module):
    import transfer_queue as tq

    stock = module.PPOTrainer._update_actor

    @functools.wraps(stock)
    def update_actor(self, batch, metrics):
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
        rows = {field: [row.clone() for row in data[field].unbind()] for field in FIELDS}
        padding = [bool(tag.get("is_padding")) for tag in batch.tags]
        _save(f"batch_{self.global_steps}.pt", {"padding": padding, "rows": rows})
        return stock(self, batch, metrics)

    module.PPOTrainer._update_actor = update_actor


def _record_parameters(module):
    _seed_value_head(module.TrainingWorker)
    _wrap(module.ActorRolloutRefWorker, "update_actor", lambda worker: worker.actor.engine.module, "actor")
    _wrap(module.TrainingWorker, "train_mini_batch", lambda worker: worker.engine.module, "critic")


def _seed_value_head(cls):
    """The critic's value head is new and drawn from an unseeded generator (two stock runs differ by it): seed it, in every run alike."""
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


def _break(module):
    """Plants the fault named by STEP_RECORD_BREAK into the streaming path."""
    fault = os.environ["STEP_RECORD_BREAK"]
    run = module.SampleInference._run

    def broken(self, index, keys, tags):
        if fault == "drop_micro_group" and index == 0:
            for done in self._done.values():
                done.update(keys)
            return
        run(self, index, keys, tags)
        if fault == "wrong_row" and index == 0:
            import transfer_queue as tq

            data = tq.kv_batch_get(keys=keys[:1], partition_id="train", select_fields=["values"])
            data["values"] = data["values"] + 1e-3
            tq.kv_batch_put(keys=keys[:1], partition_id="train", fields=data)

    module.SampleInference._run = broken


on_import("verl.trainer.ppo.v1.trainer_base", _record_batches)
on_import("verl.workers.engine_workers", _record_parameters)
if os.environ.get("STEP_RECORD_BREAK"):
    on_import("verl_fuse.host.inference", _break)
