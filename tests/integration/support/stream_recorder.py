"""External module for test runs (VERL_USE_EXTERNAL_MODULES): each update is made again by verl, from the same weights,
and both are compared; in step LATE a reward changes after its sample was streamed, in step FAILING a streamed call
fails.

Agent `stream_tail` (stream_agent.py) forces lengths and rewards. $STEP_RECORD_DIR/stream.jsonl has a line per step.
"""

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_fuse.host.upstream.on_import import on_import

LATE, FAILING = 3, 4


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("stream_agent")


def _on_workers(trainer: Any, function: Any, *args: Any) -> list[Any]:
    """What `function(actor, *args)` returns on each rank."""
    import ray

    def call(worker: Any) -> Any:
        (found,) = worker.worker_dict.values()
        return function(found.actor, *args)

    return ray.get([worker.__ray_call__.remote(call) for worker in trainer.actor_rollout_wg.workers])


def _held(actor: Any) -> dict[str, Any]:
    held = dict(actor.engine.module.named_parameters())
    for place, state in enumerate(actor.engine.optimizer.state.values()):
        held |= {f"{place} {key}": value for key, value in state.items()}
    return {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in held.items()}


def _keep(actor: Any) -> None:
    actor._before = {name: tensor.clone() for name, tensor in _held(actor).items()}
    actor._rate = actor.engine.lr_scheduler.state_dict()


def _undo(actor: Any) -> None:
    import torch

    actor._ours = {name: tensor.clone() for name, tensor in _held(actor).items()}
    with torch.no_grad():
        for name, tensor in _held(actor).items():
            # What the optimizer did not have yet begins at zero.
            tensor.copy_(actor._before[name]) if name in actor._before else tensor.zero_()
    actor.engine.lr_scheduler.load_state_dict(actor._rate)


def _differences(actor: Any) -> dict[str, float]:
    """Of parameters and of each of Adam's moments: the relative difference (l2 of all together)."""
    import torch

    stock, found = _held(actor), {}
    for moment in ("", "exp_avg", "exp_avg_sq"):
        names = [name for name in sorted(stock) if moment == name.partition(" ")[2]]
        one, other = (torch.cat([held[name].double().flatten() for name in names]) for held in (stock, actor._ours))
        found[moment or "parameters"] = float((one - other).norm() / one.norm())
    return found


def _change_rewards(trainer: Any, batch: Any) -> None:
    """Of one streamed sample, once generation has ended."""
    import transfer_queue as tq

    key = next(iter(trainer.updates._now.rows))
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


def _compare(module: Any) -> None:
    trainer, stock = module.FuseTrainer, module.PPOTrainerSync
    begin, advantage, update = trainer.on_step_begin, trainer._compute_advantage, trainer._update_actor

    def on_step_begin(self: Any) -> None:
        begin(self)
        if self.global_steps == FAILING:
            _on_workers(self, _fail)

    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        if self.global_steps == LATE:
            _change_rewards(self, batch)
        if self.global_steps == FAILING:
            _on_workers(self, _mend)
        return advantage(self, batch, metrics)

    def _update_actor(self: Any, batch: Any, metrics: dict) -> Any:
        copy = replace(batch, fields=None, extra_info=dict(batch.extra_info or {}))
        _on_workers(self, _keep)
        batch, found = update(self, batch, metrics), {}
        ours = {key: float(value) for key, value in metrics.items() if key.startswith("actor/")}
        _on_workers(self, _undo)
        stock._compute_old_log_prob(self, copy, {})
        stock._update_actor(self, copy, found)
        record = {
            "step": self.global_steps,
            "differences": _on_workers(self, _differences),
            "ours": ours,
            "stock": {key: float(value) for key, value in found.items() if key.startswith("actor/")},
            "stream": {key: value for key, value in self.updates.metrics.items() if "stream" in key},
        }
        folder = Path(os.environ["STEP_RECORD_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stream.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    trainer.on_step_begin, trainer._compute_advantage = on_step_begin, _compute_advantage
    trainer._update_actor = _update_actor


on_import("verl.experimental.agent_loop", _register_agent)
on_import("verl_fuse.host.trainer", _compare)
