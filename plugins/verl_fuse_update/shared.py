"""Does the driver's part of computing prompts once: places samples of a prompt on one rank, and counts the tokens that
are saved.

Invariants (tests/integration/test_shared_driver.py):
- the passes for log-probs and values have an order of their own, over all rows that they get; the update's is
  within mini-batches (`balance.py`), and verl's where ranks draw mini-batches themselves (actor.shuffle);
- the batch that goes on is in the order in which it came;
- model FLOPs utilization is of the tokens that are computed.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

from transfer_queue import KVBatchMeta

from verl_fuse.host.inference.stages import micro_batch
from verl_fuse.host.record.step import StageMethod, StepStage, TrainerPart
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.spec.step import Stage
from verl_fuse_update.balance import Cut, Model, balanced, cut_of, in_order, prompts_of, share_saved, work_of

# The work of each model, by stage: verl's names, and those of the metrics.
_PASSES: dict[StepStage, tuple[Model, Stage]] = {
    "old_log_prob": ("actor", "old_log_prob"),
    "ref": ("actor", "ref"),
    "values": ("critic", "values"),
}
_UPDATES: dict[StepStage, tuple[Model, str]] = {
    "update_actor": ("actor", "update"),
    "update_critic": ("critic", "update_critic"),
}


class PlacedPrompts(TrainerPart):
    """The passes and, if it `places` them, the updates of `models` whose workers compute each prompt once. `balance`:
    the order of an update says how much work it saves."""

    def __init__(self, trainer: Any, models: Collection[Model], places: Collection[Model], balance: bool) -> None:
        self._trainer, self._models, self._places, self._balance = trainer, models, places, balance
        # Of this step, by pass or update: tokens, those of prompts, and those of prompts that were computed.
        self._step, self._tokens = -1, dict[str, tuple[int, int, int]]()
        self.metrics: dict[str, float] = {}

    def method(self, stage: StepStage, stock: StageMethod) -> StageMethod:
        """Return verl's pass or update on rows that are placed anew."""
        model, work = {**_PASSES, **_UPDATES}.get(stage, (None, ""))
        if model not in self._models:
            return stock
        return partial(self._pass if stage in _PASSES else self._update, model, work, stock)

    def _pass(self, model: Model, stage: Stage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        order = balanced(work_of(batch), self._cut_of_pass(stage, len(batch)), prompts_of(batch))
        ordered = in_order(batch, order)
        found = stock(ordered, metrics)
        # verl leaves what a stage tells its workers in the batch that it got.
        batch.extra_info = {**(batch.extra_info or {}), **(ordered.extra_info or {})}
        self._count(stage, "ref" if stage == "ref" and not self._trainer.ref_in_actor else model)
        return in_order(found, inverse(order))

    def _update(self, model: Model, work: str, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        ordered, config = batch, self._trainer.config
        shuffles = (config.critic if model == "critic" else config.actor_rollout_ref.actor).get("shuffle")
        if model in self._places and not shuffles:
            cut, rows, prompts = cut_of(self._trainer, model, packed=True), work_of(batch), prompts_of(batch)
            order = balanced(rows, cut, prompts)
            ordered = in_order(batch, order)
            if self._balance:
                metrics[f"fuse/{model}_balance_saved"] = share_saved(rows, order, cut, prompts)
        stock(ordered, metrics)
        tokens, all_prompts, computed = self._count(work, model)
        # verl counts the work of every row as if it were alone.
        if (utilization := f"perf/mfu/{model}") in metrics and tokens:
            metrics[utilization] *= 1 - (all_prompts - computed) / tokens
        return batch

    def _cut_of_pass(self, stage: Stage, rows: int) -> Cut:
        trainer, block = self._trainer, self._trainer.config.actor_rollout_ref
        if stage == "values":
            # verl cuts them by tokens, whatever the critic's block says.
            return Cut(data_parallel_size(trainer.critic_wg, "train"), rows)
        apart = stage == "ref" and not trainer.ref_in_actor
        group, mesh, node = (
            (trainer.ref_policy_wg, "ref", block.ref) if apart else (trainer.actor_rollout_wg, "actor", block.rollout)
        )
        size = None if node.log_prob_use_dynamic_bsz else micro_batch(trainer.config, stage, trainer.ref_in_actor)
        return Cut(data_parallel_size(group, mesh), rows, size)

    def _count(self, work: str, model: Literal["actor", "ref", "critic"]) -> tuple[int, int, int]:
        groups = {"actor": "actor_rollout_wg", "ref": "ref_policy_wg", "critic": "critic_wg"}
        found = getattr(self._trainer, groups[model]).take_tokens(model)
        if self._step != self._trainer.global_steps:
            self._step, self._tokens = self._trainer.global_steps, {}
        before = self._tokens.get(work, (0, 0, 0))
        tokens, prompts, computed = (sum(each) for each in zip(before, *found, strict=True))
        self._tokens[work] = tokens, prompts, computed
        self.metrics = {
            f"fuse/{work}_shared_tokens": 1 - computed / prompts
            for work, (_, prompts, computed) in self._tokens.items()
            # verl's pass computes nothing in bypass mode.
            if prompts
        }
        return self._tokens[work]


def inverse(order: Sequence[int]) -> list[int]:
    """Return the order that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
