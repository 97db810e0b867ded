"""Runs the update as verl does: the critic, then the actor, each alone on the training workers."""

from collections.abc import Callable, Collection
from functools import partial

from transfer_queue import KVBatchMeta

from verl_fuse.host.record.step import RunStage
from verl_fuse.spec.timeline import UPDATE_ACTOR, UPDATE_CRITIC

# One of verl's stage methods: works on a batch, adds metrics, returns the batch.
UpdateCall = Callable[[KVBatchMeta, dict], KVBatchMeta]


class SeparateUpdates:
    """`run` runs a stage on the training workers."""

    def __init__(self, run: RunStage):
        self._run = run

    def critic(self, batch: KVBatchMeta, metrics: dict, critic: UpdateCall, actor: UpdateCall) -> KVBatchMeta:
        """Take verl's turn of the critic, in which both may be updated; `critic` and `actor` are verl's methods."""
        return self._run(UPDATE_CRITIC, "train", partial(critic, batch, metrics))

    def old_log_prob(self, batch: KVBatchMeta, metrics: dict, stock: UpdateCall) -> KVBatchMeta:
        """Run verl's old log-probs, with which the update of the actor compares."""
        return stock(batch, metrics)

    def advantage(self, batch: KVBatchMeta, metrics: dict, stock: UpdateCall) -> KVBatchMeta:
        """Run verl's advantages."""
        return stock(batch, metrics)

    def discard(self, keys: Collection[str]) -> None:
        """Act before rows of these trajectories are cleared, before the batch of the step is there."""

    def actor(self, batch: KVBatchMeta, metrics: dict, actor: UpdateCall) -> KVBatchMeta:
        """Take verl's turn of the actor."""
        return self._run(UPDATE_ACTOR, "train", partial(actor, batch, metrics))
