"""External module for test runs (VERL_USE_EXTERNAL_MODULES): a rollout with a long tail, and a
second opinion on its numbers.

Agent `long_tail` (long_tail_agent.py) forces the lengths. Before each advantage the driver saves what the fused step
computed, and what verl's own stage methods compute for the same batch with the same weights
($STEP_RECORD_DIR/step_N.pt); with $STOCK_AGAIN first for its rows in reverse.
"""

import functools
import importlib
import os
from pathlib import Path

from verl_fuse.host.upstream.on_import import on_import

COMPUTED = ["old_log_probs", "ref_log_prob", "values"]
GIVEN = ["responses", "rollout_log_probs", "response_mask"]


def _register_agent(module):
    # Hydra looks the agent up by its module and name.
    importlib.import_module("long_tail_agent")


def _record_batches(module):
    import torch
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    trainer = module.PPOTrainer
    stock = trainer._compute_advantage

    def stored(batch, fields):
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        return {field: [row.clone() for row in data[field].unbind()] for field in fields}

    @functools.wraps(stock)
    def compute_advantage(self, batch, metrics):
        record = {"keys": list(batch.keys), "tags": [dict(tag) for tag in batch.tags]}
        record["index"] = [
            int(index)
            for index in tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["index"])[
                "index"
            ]
        ]
        record["given"], record["fused"] = stored(batch, GIVEN), stored(batch, COMPUTED)
        orders = {"again": -1, "stock": 1} if os.environ.get("STOCK_AGAIN") else {"stock": 1}
        for name, order in orders.items():
            again = KVBatchMeta(
                keys=list(batch.keys)[::order],
                tags=record["tags"][::order],
                partition_id=batch.partition_id,
                extra_info=dict(batch.extra_info),
            )
            for stage in (trainer._compute_old_log_prob, trainer._compute_ref_log_prob, trainer._compute_values):
                stage(self, again, {})
            record[name] = stored(batch, COMPUTED)
        folder = Path(os.environ["STEP_RECORD_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(record, folder / f"step_{self.global_steps}.pt")
        return stock(self, batch, metrics)

    trainer._compute_advantage = compute_advantage


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl.trainer.ppo.v1.trainer_base", _record_batches)
