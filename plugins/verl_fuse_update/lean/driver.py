"""Does the driver's part of a lean update: chooses the stages that run and the rows of each rank, and counts the work
left out.

Invariants (tests/integration/test_lean_run.py, tests/integration/test_lean_driver.py):
- rows leave the old log-prob pass only in steps that train the actor, on mini-batches whose rows are known; in all
  others the whole pass is run and counted;
- metrics that are made of old log-probs are made of the update's, after it;
- the batch that goes on is verl's, whatever order its rows were trained in.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from verl_fuse.host.inference.stages import micro_batch, old_log_prob_metrics
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse.host.record.step import RunStage, StageMethod, StepStage, StockStage, TrainerPart
from verl_fuse.host.upstream.advantages import without_gradient
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.host.upstream.rows import read, rows, tags_of
from verl_fuse.spec.micro_batches import FORWARD
from verl_fuse.spec.timeline import UPDATE_ACTOR, ZERO_GRADIENT_SAMPLES, ZERO_GRADIENT_TOKENS
from verl_fuse_update.balance import Cut, balanced, cut_of, in_order, prompts_of, share_saved, work_of
from verl_fuse_update.lean.options import LEAN, LeanOptions
from verl_fuse_update.short_pass import ShortPass, run_short_pass

logger = logging.getLogger(__name__)


def saved_seconds(seconds: float, skipped: float, own: float, forwarded: float) -> float:
    """Return the seconds saved by an update that took `seconds`: metrics needed a forward pass for the left-out share
    `skipped` of its tokens in the share `forwarded` of the mini-batches, and the share `own` of the tokens left the
    pass for old log-probs."""
    left = skipped * (1 - FORWARD * forwarded)
    return seconds * (left + FORWARD * own) / (1 - left) if left < 1 else 0.0


class LeanUpdates(TrainerPart):
    """The updates of `trainer`; `options` tell the parts that are left out. `balance`: rows are placed anew in steps
    that leave none out, too. `share`: workers compute each prompt once."""

    def __init__(
        self, trainer: Any, run: RunStage, options: LeanOptions, balance: bool = False, share: bool = False
    ) -> None:
        self._trainer, self._run, self._options, self._balance, self._share = trainer, run, options, balance, share
        self._own, self._passes = False, 0
        # verl's pass, where it waits for advantages.
        self._pass: StageMethod | None = None
        # Seconds in which the update trained before its stage began.
        self.seconds_before = 0.0
        self.metrics: dict[str, float] = {}

    def around(self, stage: StepStage, batch: KVBatchMeta, metrics: dict, stock: StockStage) -> KVBatchMeta:
        if stage == "old_log_prob":
            return self.old_log_prob(batch, metrics, stock)
        if stage == "advantage":
            return self.advantage(batch, metrics, stock)
        return stock(batch, metrics, partial(self.actor, actor=stock.method) if stage == "update_actor" else None)

    def old_log_prob(self, batch: KVBatchMeta, metrics: dict, stock: StageMethod) -> KVBatchMeta:
        """Run verl's pass, or let it wait for advantages where the update computes a part of the same."""
        reason = self._why_pass(batch) if self._options.skip_old_log_prob else ""
        self._own, self._pass = reason is None, stock
        if reason:
            self._passes += 1
            logger.info("step %d computes old log-probs: %s", self._trainer.global_steps, reason)
        return batch if self._own else stock(batch, metrics)

    def advantage(self, batch: KVBatchMeta, metrics: dict, stock: StageMethod) -> KVBatchMeta:
        """Run verl's advantages, in which old log-probs have no part."""
        with self._without_correction() if self._own else nullcontext():
            return stock(batch, metrics)

    def actor(self, batch: KVBatchMeta, metrics: dict, actor: StageMethod) -> KVBatchMeta:
        """Update the actor, on the same mini-batches."""
        found = self._trainer.journal.step.with_gradient
        kept = found if self._options.skip_zero_gradient else [True] * len(batch)
        shares = without_gradient(batch, kept)
        said = {"skipped_samples": shares[ZERO_GRADIENT_SAMPLES], "skipped_tokens": shares[ZERO_GRADIENT_TOKENS]}
        short = self._pass_rest(batch, found, metrics) if self._own else None
        said["own_log_probs"] = short.share if short else 0.0
        watch = Stopwatch()
        self._run(UPDATE_ACTOR, "train", partial(self.train, batch, kept, metrics, actor), **said)
        saved = saved_seconds(
            watch.now - watch.start + self.seconds_before,
            said["skipped_tokens"],
            # The pass is one of an epoch's forward passes.
            said["own_log_probs"] / self._trainer.config.actor_rollout_ref.actor.ppo_epochs,
            self._forwarded(len(batch) // self._mini_batch),
        )
        self.metrics = {f"fuse/update_{name}": share for name, share in said.items()} | {
            "fuse/update_saved_seconds": saved,
            "fuse/update_old_log_prob_passes": float(self._passes),
        }
        if short:
            several, options = len(batch) > self._mini_batch, self._options
            # With a KL loss the update computes rows that the pass left out: what it says is of the same rows in all
            # mini-batches.
            counted = found if options.short_pass and several else kept
            computed = {key for key, one in zip(batch.keys, counted, strict=True) if one}
            told = [key for key in short.known if options.metrics == "stock" or key in computed]
            metrics.update(self._of_old_log_probs(rows(told, tags_of(batch), None)) if told else {})
        return batch

    def _pass_rest(self, batch: KVBatchMeta, with_gradient: Sequence[bool], metrics: dict) -> ShortPass:
        """Run verl's pass for the rows whose old log-probs no update computes."""
        run = self._pass
        assert run is not None, "an update before its old log-probs"
        needs = with_gradient if self._options.short_pass else [True] * len(batch)
        size = micro_batch(self._trainer.config, "old_log_prob", ref_in_actor=False)
        return run_short_pass(batch, self._cut, size, needs, "old_log_probs", lambda rest: run(rest, metrics))

    def train(self, batch: KVBatchMeta, kept: list[bool], metrics: dict, actor: StageMethod) -> None:
        """Update the actor on its lane; `kept` tells for each row whether it is computed."""
        ordered = self._ordered(batch, kept, metrics)
        lean = replace(self._options, skip_old_log_prob=self._own)
        ordered.extra_info = {**(ordered.extra_info or {}), LEAN: lean}
        if self._own:
            # verl's batch lists the columns that were there before old log-probs.
            ordered.fields = None
        actor(ordered, metrics)
        first = self._cut.first(len(batch)) if self._own else []
        computed = dict(zip(batch.keys, kept, strict=True))
        if first and (self._options.metrics == "stock" or any(computed[ordered.keys[place]] for place in first)):
            asked = replace(in_order(ordered, first), fields=["response_mask"], extra_info={})
            self._trainer.actor_rollout_wg.log_probs_of_update(asked)

    def _why_pass(self, batch: KVBatchMeta) -> str | None:
        config, step = self._trainer.config, self._trainer.global_steps
        if config.trainer.critic_warmup > step:
            return "the actor is not trained yet"
        if not self._cut.divides(len(batch)):
            return f"{len(batch)} rows are not mini-batches of {self._mini_batch} on {self._cut.ranks} ranks"
        if len(batch) != self._mini_batch and config.actor_rollout_ref.actor.shuffle:
            return "each rank draws the rows of its first mini-batch"
        return None

    def _forwarded(self, mini_batches: int) -> float:
        """Return the share of an epoch's `mini_batches`, all epochs together, in which samples that are left out go
        through a forward pass."""
        actor, options = self._trainer.config.actor_rollout_ref.actor, self._options
        if options.metrics == "computed":
            return 0.0
        if self._own or options.bypass or actor.calculate_entropy:
            return 1.0
        return 1.0 - 1.0 / (mini_batches * actor.ppo_epochs)

    @property
    def _cut(self) -> Cut:
        """Return how verl cuts a batch into mini-batches; micro-batches are cut anew on their rank."""
        return Cut(data_parallel_size(self._trainer.actor_rollout_wg, "actor"), self._mini_batch)

    @property
    def _mini_batch(self) -> int:
        block = self._trainer.config.actor_rollout_ref
        return block.actor.ppo_mini_batch_size * block.rollout.n

    def _ordered(self, batch: KVBatchMeta, kept: list[bool], metrics: dict) -> KVBatchMeta:
        order = list(range(len(batch)))
        # With shuffled rows each epoch has mini-batches of its own.
        anew = self._balance or self._share or not all(kept)
        if anew and not self._trainer.config.actor_rollout_ref.actor.shuffle:
            cut = cut_of(self._trainer, "actor", packed=self._share) if all(kept) else self._cut
            work = [one * amount for one, amount in zip(kept, work_of(batch), strict=True)]
            prompts = prompts_of(batch) if self._share else None
            order = balanced(work, cut, prompts)
            if self._balance:
                metrics["fuse/actor_balance_saved"] = share_saved(work, order, cut, prompts)
        return in_order(batch, order)

    @contextmanager
    def _without_correction(self) -> Iterator[None]:
        """Switch verl's comparison of old log-probs with the rollout's off, beside advantages: there are no old
        log-probs yet."""
        algorithm = self._trainer.config.algorithm
        correction = algorithm.get("rollout_correction", None)
        OmegaConf.update(algorithm, "rollout_correction", None, merge=False, force_add=True)
        try:
            yield
        finally:
            OmegaConf.update(algorithm, "rollout_correction", correction, merge=False, force_add=True)

    def _of_old_log_probs(self, batch: KVBatchMeta) -> dict[str, float]:
        """Return verl's metrics of these rows that are made of old log-probs."""
        config = self._trainer.config
        found = old_log_prob_metrics(config, batch)
        correction = config.algorithm.get("rollout_correction", None)
        data = read(batch, ["response_mask", "rollout_log_probs", "old_log_probs"])
        if correction is not None and "rollout_log_probs" in data:
            _, more = compute_rollout_correction_and_add_to_batch(DataProto(batch=data.to_padded_tensor()), correction)
            found |= more
        return found
