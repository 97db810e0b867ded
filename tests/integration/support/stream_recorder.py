"""External module for test runs (VERL_USE_EXTERNAL_MODULES): each update is made again by verl, from the same weights,
and both are compared; in step LATE a reward changes after its sample was streamed, in step FAILING a streamed call
fails, in step EVICTED a streamed group is said to be discarded. $STREAM_FAULTS has other steps, 0 for none.

Agent `stream_tail` (stream_agent.py) forces lengths and rewards. $STEP_RECORD_DIR/stream.jsonl has a line per step.
"""

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from kept_actor import differences, keep, on_workers, undo

from verl_fuse.host.upstream.on_import import on_import

# Steps: a reward changes late, a call fails, a group is evicted.
LATE, FAILING, EVICTED = map(int, os.environ.get("STREAM_FAULTS", "3 4 5").split())


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("stream_agent")


def _change_rewards(trainer: Any, batch: Any) -> None:
    """Of one streamed sample, once generation has ended."""
    import transfer_queue as tq

    key = next(iter(trainer.director.training._now.rows))
    where = {"keys": [key], "partition_id": batch.partition_id}
    data = tq.kv_batch_get(**where, select_fields=["rm_scores"])
    data["rm_scores"].values()[-1] += 1.0
    tq.kv_batch_put(**where, fields=data)


def _fail(actor: Any) -> None:
    """The next loss fails, once."""
    actor._stock_loss = stock = actor.loss_fn

    def failing(**batch: Any) -> Any:
        actor.loss_fn = stock
        raise MemoryError("planted")

    actor.loss_fn = failing


def _mend(actor: Any) -> None:
    """Also on a rank that streamed nothing."""
    actor.loss_fn = actor._stock_loss


def _mark(module: Any) -> None:
    """The agent waits for the end of the streamed call after which only its own group is left."""
    stream = module.StreamedUpdates._stream

    def marked(self: Any, now: Any, *args: Any) -> None:
        try:
            stream(self, now, *args)
        finally:
            if len(now.handed) == self._trainer.config.data.train_batch_size - 1:
                (_folder() / "streamed").touch()

    module.StreamedUpdates._stream = marked


def _folder() -> Path:
    folder = Path(os.environ["STEP_RECORD_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compare(module: Any) -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync as stock

    trainer = module.FuseTrainer
    begin, advantage, update = trainer.on_step_begin, trainer._compute_advantage, trainer._update_actor

    def on_step_begin(self: Any) -> None:
        begin(self)
        (_folder() / "streamed").unlink(missing_ok=True)
        if self.global_steps == FAILING:
            on_workers(self, _fail)

    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        if self.global_steps == LATE:
            _change_rewards(self, batch)
        if self.global_steps == EVICTED:
            self.director.training.discard(list(self.director.training._now.rows)[:1])
        if self.global_steps == FAILING:
            on_workers(self, _mend)
        return advantage(self, batch, metrics)

    def _update_actor(self: Any, batch: Any, metrics: dict) -> Any:
        copy = replace(batch, fields=None, extra_info=dict(batch.extra_info or {}))
        on_workers(self, keep)
        batch, found = update(self, batch, metrics), {}
        ours = {key: float(value) for key, value in metrics.items() if key.startswith("actor/")}
        on_workers(self, undo)
        stock._compute_old_log_prob(self, copy, {})
        stock._update_actor(self, copy, found)
        record = {
            "step": self.global_steps,
            "differences": on_workers(self, differences),
            "ours": ours,
            "stock": {key: float(value) for key, value in found.items() if key.startswith("actor/")},
            "stream": {key: value for key, value in self.director.training.metrics.items() if "stream" in key},
        }
        with (_folder() / "stream.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    trainer.on_step_begin, trainer._compute_advantage = on_step_begin, _compute_advantage
    trainer._update_actor = _update_actor


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl_fuse.host.trainer", _compare)
on_import("verl_fuse_update.stream.driver", _mark)
