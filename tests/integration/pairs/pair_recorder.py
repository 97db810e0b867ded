"""External module for verl runs (VERL_USE_EXTERNAL_MODULES): every number of a fused step beside stock
verl's, in the same run.

Agents `pairs` (pair_agent.py) and `pair_tools` (pair_tools.py) force the lengths. Before each advantage, verl's own
stage methods compute the batch once more, with the same weights; before each update, verl's own update trains the same
batch, and what it changed in models and optimizers is undone. Where the critic's update takes the place of values, all
of verl's stages up to that update come before it. Where logits are of responses alone, or prompts are computed once,
verl's own computation has all of them. $STEP_RECORD_DIR/step_N.json holds what differs. In stock verl nothing is done
but forcing lengths.
"""

import functools
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from verl_fuse.host.upstream.on_import import on_import

# What a step computes, and what its advantage is made from or writes: undone after verl's own computation.
COMPUTED = ("old_log_probs", "ref_log_prob", "values", "advantages", "returns")
CHANGED = (*COMPUTED, "entropy", "log_probs", "response_mask", "token_level_rewards", "rollout_is_weights")
GAP = "training/rollout_probs_diff_max"
# The classes of engines that are verl-fuse's, and their switches.
CHANGED_ENGINES = {"SharedPrompts": "share_prompts", "ResponseLogits": "response_logits"}
LEARNED = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")


def _register_agent(module: Any) -> None:
    # Hydra looks agents up by their modules and names.
    importlib.import_module("pair_agent")
    importlib.import_module("pair_tools")


def _compare_steps(module: Any) -> None:
    trainer = module.FuseTrainer
    _compare_inference(trainer)
    _compare_critic_first(trainer)
    for method, models in (("_update_critic", "critic"), ("_update_actor", "actor")):
        _compare_update(trainer, method, models)


def _stored(batch: Any, wanted: tuple[str, ...]) -> Any:
    import transfer_queue as tq

    there = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    return there.select(*(name for name in wanted if name in there.keys()))  # noqa: SIM118


def _again(batch: Any) -> Any:
    from transfer_queue import KVBatchMeta

    tags = [dict(tag) for tag in batch.tags]
    # verl leaves what the reference asked for in the batch: with LoRA, a policy without its adapter.
    extra = {key: value for key, value in (batch.extra_info or {}).items() if key != "no_lora_adapter"}
    return KVBatchMeta(keys=list(batch.keys), tags=tags, partition_id=batch.partition_id, extra_info=extra)


def _compare_inference(trainer: Any) -> None:
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    fused = trainer._compute_advantage

    @functools.wraps(fused)
    def compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        given = _stored(batch, CHANGED)
        copy, found = _again(batch), {}
        with _as_built(self):
            PPOTrainer._compute_old_log_prob(self, copy, found)
            if self.use_reference_policy:
                PPOTrainer._compute_ref_log_prob(self, copy, found)
        if self.use_critic and not _is_critic_trained(self):
            PPOTrainer._compute_values(self, copy, found)
        elif self.use_critic:
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=self._pair_values)
        PPOTrainer._compute_advantage(self, copy, found)
        stock = _rows(_stored(copy, COMPUTED))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=given)
        batch = fused(self, batch, metrics)
        ours = _rows(_stored(batch, COMPUTED))
        mask = _rows(_stored(batch, ("response_mask",)))["response_mask"]
        self._pair_record = {
            "step": self.global_steps,
            **_samples(batch),
            "expected": self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n,
            "gap": {"fused": metrics.get(GAP), "stock": found.get(GAP)},
            "differences": {name: _difference(stock[name], ours.get(name), mask) for name in stock},
            "learned": {},
        }
        if _is_critic_trained(self):
            self._pair_record["learned"] |= _learned("critic", self._pair_alone, metrics)
        return batch

    trainer._compute_advantage = compute_advantage


def _is_critic_trained(trainer: Any) -> bool:
    first = _part(trainer, "CriticFirst")
    return first is not None and first.trained


def _part(trainer: Any, name: str) -> Any:
    """Return the part of this class; None where its feature is off."""
    return next((part for part in trainer.parts if type(part).__name__ == name), None)


def _compare_critic_first(trainer: Any) -> None:
    """Keep the values and the metrics of verl's own stages up to the critic's update, whose work is undone."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    fused = trainer._compute_values

    @functools.wraps(fused)
    def compute_values(self: Any, batch: Any, metrics: dict) -> Any:
        if _part(self, "CriticFirst"):
            given, copy, self._pair_alone = _stored(batch, CHANGED), _again(batch), {}
            _on_ranks(self, "critic", keep)
            PPOTrainer._compute_values(self, copy, {})
            self._pair_values = _stored(copy, ("values",))
            PPOTrainer._compute_advantage(self, copy, {})
            PPOTrainer._update_critic(self, copy, self._pair_alone)
            _on_ranks(self, "critic", undo)
            # Values that the fused step does not write itself would show.
            given["values"] = self._pair_values["values"] * float("nan")
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=given)
        return fused(self, batch, metrics)

    trainer._compute_values = compute_values


def _samples(batch: Any) -> dict[str, int]:
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    return {"samples": len(keys), "duplicated": sum(count - 1 for count in Counter(keys).values())}


def _rows(stored: Any) -> dict[str, list[Any]]:
    return {name: [row.clone() for row in stored[name].unbind()] for name in stored.keys()}  # noqa: SIM118


def _difference(stock: list[Any], ours: list[Any] | None, mask: list[Any]) -> float:
    """Largest one of a token that is trained; infinite where the fused step has no number, or one that is none."""
    import torch

    if ours is None:
        return float("inf")
    kept = [(one - other)[row.bool()].double().abs() for one, other, row in zip(stock, ours, mask, strict=True)]
    worst = torch.cat(kept).max().item()
    return worst if worst == worst else float("inf")


def _compare_update(trainer: Any, method: str, model: str) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    fused, stock = getattr(trainer, method), getattr(PPOTrainer, method)

    @functools.wraps(fused)
    def update(self: Any, batch: Any, metrics: dict) -> Any:
        if model == "critic" and _is_critic_trained(self):
            return fused(self, batch, metrics)
        _on_ranks(self, model, keep)
        alone: dict[str, float] = {}
        with _as_built(self):
            stock(self, _again(batch), alone)
        _on_ranks(self, model, undo)
        batch = fused(self, batch, metrics)
        if model == "critic" and _part(self, "DeferredCritic"):
            _learn_later(self, alone)
        else:
            self._pair_record["learned"] |= _learned(model, alone, metrics)
        if model == "actor":
            _write(self._pair_record)
        return batch

    setattr(trainer, method, update)


@contextmanager
def _as_built(trainer: Any) -> Iterator[None]:
    """Meanwhile the actor's workers compute all logits and each sample's prompt; those that do so anyway where they
    should not are an error."""
    block = trainer.settings.blocks["update"]
    on = [name for name, switch in CHANGED_ENGINES.items() if getattr(block, switch)]
    _on_ranks(trainer, "actor", functools.partial(build_again, on))
    yield
    _on_ranks(trainer, "actor", change_again)


def _on_ranks(trainer: Any, model: str, work: Any) -> None:
    import ray

    # A critic may have workers of its own.
    group = trainer.critic_wg if model == "critic" else trainer.actor_rollout_wg
    ray.get([worker.__ray_call__.remote(work, model) for worker in group.workers])


def _learned(model: str, alone: dict, metrics: dict) -> dict[str, list[float]]:
    names = [name for name in LEARNED if name.startswith(f"{model}/") and name in alone]
    return {name: [float(alone[name]), float(metrics.get(name, "inf"))] for name in names}


def _learn_later(trainer: Any, alone: dict) -> None:
    """A deferred update's metrics are logged when it is done, which may be in the step after: they are added to the
    record of their step then, and are infinite before."""
    deferred = _part(trainer, "DeferredCritic")
    record, log = trainer._pair_record, deferred._log
    record["learned"] |= _learned("critic", alone, {})

    def logged(metrics: dict, step: int) -> None:
        deferred._log = log
        log(metrics, step)
        assert step == record["step"], f"metrics of step {step} for {record['step']}"
        record["learned"] |= _learned("critic", alone, metrics)
        _write(record)

    deferred._log = logged


def _write(record: dict) -> None:
    folder = Path(os.environ["STEP_RECORD_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{record['step']}.json").write_text(json.dumps(record))


def keep(worker: Any, model: str) -> None:
    """On a rank: remember a model's shards and its optimizer's."""
    engine = _engine(worker, model)
    parameters = [_local(parameter).detach().clone() for parameter in engine.module.parameters()]
    moments = {
        parameter: {name: _copied(value) for name, value in state.items()}
        for parameter, state in engine.optimizer.state.items()
    }
    worker._pair_kept = parameters, moments, deepcopy(engine.lr_scheduler.state_dict())


def undo(worker: Any, model: str) -> None:
    """On a rank: put back what `keep` remembered."""
    import torch

    engine = _engine(worker, model)
    parameters, moments, rate = worker._pair_kept
    with torch.no_grad():
        for parameter, kept in zip(engine.module.parameters(), parameters, strict=True):
            _local(parameter).copy_(kept)
    engine.optimizer.state.clear()
    engine.optimizer.state.update(moments)
    engine.lr_scheduler.load_state_dict(rate)
    for group, value in zip(engine.optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = value


def build_again(on: Sequence[str], worker: Any, model: str) -> None:
    """On a rank: let policy and reference be verl's engines, as verl built them; they are changed by the classes `on`
    until then."""
    from transformers import PreTrainedModel

    actor = _actor(worker)
    worker._pair_engines = []
    for engine in [one.engine for one in (actor.actor, actor.ref) if one is not None]:
        kind = type(engine)
        changed = [name for name in CHANGED_ENGINES if any(base.__name__ == name for base in kind.__mro__)]
        assert changed == list(on), f"{kind.__name__} is changed by {changed} in place of {on}"
        config = next(part for part in engine.module.modules() if isinstance(part, PreTrainedModel)).config
        worker._pair_engines.append((engine, kind, config, config._attn_implementation))
        engine.__class__ = next(base for base in kind.__mro__ if base.__module__.startswith("verl."))
        config._attn_implementation = getattr(engine, "_kernel", config._attn_implementation)


def change_again(worker: Any, model: str) -> None:
    """On a rank: undo `build_again`."""
    for engine, kind, config, attention in worker._pair_engines:
        engine.__class__, config._attn_implementation = kind, attention


def _engine(worker: Any, model: str) -> Any:
    return worker.worker_dict["critic"].engine if model == "critic" else _actor(worker).actor.engine


def _actor(worker: Any) -> Any:
    return next(one for one in worker.worker_dict.values() if getattr(one, "actor", None) is not None)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _copied(value: Any) -> Any:
    return value.detach().clone() if hasattr(value, "detach") else deepcopy(value)


# Tests import this module for its names, and train nothing.
if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    on_import("verl.experimental.agent_loop", _register_agent)
    on_import("verl_fuse.host.trainer", _compare_steps)
