"""Does the driver's part of a critic's update with values of its own: the update takes the place of verl's pass for
values, which runs before it for the rows of later mini-batches.

Nothing between the two reads the critic's weights, so that samples, values, advantages and both updates are verl's.

Invariants (tests/integration/test_critic_first.py):
- a step whose rows verl cannot cut into mini-batches runs verl's pass and verl's update, and is counted;
- the update reads every column that the batch has by then;
- rows may be placed anew within their mini-batch by another part: values are those of the same rows.
"""

import logging
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_fuse.host.inference.stages import micro_batch
from verl_fuse.host.record.step import RunStage, StageMethod, StepStage, StockStage, TrainerPart
from verl_fuse.spec.timeline import UPDATE_CRITIC
from verl_fuse_update.balance import Cut, cut_of, in_order
from verl_fuse_update.critic.returns import Rewards
from verl_fuse_update.critic.worker import OWN_VALUES
from verl_fuse_update.short_pass import run_short_pass

logger = logging.getLogger(__name__)


class CriticFirst(TrainerPart):
    """Updates the critic of `trainer` where verl computes values; `run` runs a stage on the training workers."""

    def __init__(self, trainer: Any, run: RunStage) -> None:
        super().__init__()
        self._trainer, self._run = trainer, run
        self._passes = 0
        # It tells whether the critic of this step is trained already.
        self.trained = False
        self.metrics: dict[str, float] = {}

    def around(self, stage: StepStage, batch: KVBatchMeta, metrics: dict, stock: StockStage) -> KVBatchMeta:
        """Update the critic in the turn of the pass for values, where that is possible."""
        if stage == "values":
            done = self.train(batch, metrics, stock, partial(PPOTrainerSync._update_critic, self._trainer))
        else:
            done = stage == "update_critic" and self.trained
        return batch if done else stock(batch, metrics)

    def train(self, batch: KVBatchMeta, metrics: dict, values: StageMethod, critic: StageMethod) -> bool:
        """Update the critic with `critic` after the pass `values`, verl's methods, and store the values of `batch`;
        return whether that was possible."""
        cut, share = cut_of(self._trainer, "critic"), 0.0
        self.trained = cut.divides(len(batch))
        if self.trained:
            size, needs = self._micro_batch if len(batch) > cut.mini_batch else 1, [True] * len(batch)
            share = run_short_pass(batch, cut, size, needs, "values", lambda rest: values(rest, metrics)).share
            update = partial(self._update, cut, critic)
            for part in self._trainer.parts:
                update = part.method("update_critic", update)
            self._run(UPDATE_CRITIC, "train", partial(update, batch, metrics), own_values=share)
        else:
            self._passes += 1
            reason = f"{len(batch)} rows are not mini-batches of {cut.mini_batch} on {cut.ranks} ranks"
            logger.info("step %d computes values before the critic's update: %s", self._trainer.global_steps, reason)
        self.metrics = {
            "fuse/update_own_values": share,
            "fuse/update_values_passes": float(self._passes),
        }
        return self.trained

    def _update(self, cut: Cut, critic: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # verl's batch may list the columns that were there before the reference's: the update reads all of them.
        asked = replace(batch, fields=None, extra_info={**(batch.extra_info or {}), OWN_VALUES: self._rewards()})
        critic(asked, metrics)
        asked = replace(in_order(batch, cut.first(len(batch))), fields=["response_mask"], extra_info={})
        self._trainer.critic_wg.values_of_update(asked)
        return batch

    @cached_property
    def _micro_batch(self) -> int:
        # To tell it, verl reads the model's configuration and tokenizer.
        return micro_batch(self._trainer.config, "values", ref_in_actor=False)

    def _rewards(self) -> Rewards:
        algorithm = self._trainer.config.algorithm
        with_kl = bool(algorithm.use_kl_in_reward)
        return Rewards(
            gamma=float(algorithm.gamma),
            lam=float(algorithm.lam),
            penalty=algorithm.kl_penalty if with_kl else None,
            # The controller changes after advantages: this is the value that they will have.
            coefficient=float(self._trainer.kl_ctrl_in_reward.value) if with_kl else 0.0,
        )
