"""Updates critic and actor in one call to their workers.

verl's `_update_critic` and `_update_actor` run unchanged, side by side: each prepares its batch and calls its worker
group, both calls become one, and each goes on with its own model's output and metrics.

Every model is updated once per step, on the same rows, split over its own data-parallel ranks, with the same metadata
as by verl's two calls.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from transfer_queue import KVBatchMeta
from verl.single_controller.base.decorator import collect_lazy_compute_data_proto, dispatch_lazy_compute_data_proto
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_fuse.host.record.step import RunStage, StageMethod, StepStage, StockStage, TrainerPart
from verl_fuse.spec.timeline import FUSED_UPDATE
from verl_fuse_pipeline.joint import JointCalls
from verl_fuse_pipeline.report import RankReport, UpdateOrder
from verl_fuse_pipeline.schedules import Solve, UpdateSchedules

logger = logging.getLogger(__name__)

# The RPC mesh each model's batch is dispatched over (verl/workers/engine_workers.py).
_MESH = {"critic": "train", "actor": "actor"}


class FusedUpdates(TrainerPart):
    """The updates of `trainer`, whose worker groups of "actor" and "critic" are `groups`; `timeout`: seconds a rank may
    wait within an update.

    While the critic warms up, nothing is fused."""

    def __init__(self, trainer: Any, groups: Mapping[str, Any], run: RunStage, solve: Solve, timeout: float) -> None:
        self._trainer, self._run = trainer, run
        self._groups = groups
        self._schedules = UpdateSchedules(solve)
        self._timeout = timeout
        self._actor_updated = False
        self.metrics: dict[str, float] = {}

    def around(self, stage: StepStage, batch: KVBatchMeta, metrics: dict, stock: StockStage) -> KVBatchMeta:
        """Update both in the critic's turn, where the actor is trained in this step."""
        if stage == "update_critic" and self._trainer.config.trainer.critic_warmup <= self._trainer.global_steps:
            actor = partial(PPOTrainerSync._update_actor, self._trainer)
            return stock(batch, metrics, partial(self._both, critic=stock.method, actor=actor))
        if stage == "update_actor" and self._actor_updated:
            self._actor_updated = False
            return batch
        return stock(batch, metrics)

    def _both(self, batch: KVBatchMeta, metrics: dict, critic: StageMethod, actor: StageMethod) -> KVBatchMeta:
        # Both methods write what their workers should know into the batch they get.
        jobs = {
            model: partial(update, replace(batch, extra_info=dict(batch.extra_info or {})), metrics)
            for model, update in (("actor", actor), ("critic", critic))
        }
        self._run(FUSED_UPDATE, "train", partial(self._together, jobs))
        self._actor_updated = True
        return batch

    def _together(self, jobs: Mapping[str, Callable[[], Any]]) -> None:
        """Run verl's update methods, by model, with one call to the workers."""
        trainer, calls = self._trainer, JointCalls(self._call)

        def train_mini_batch(batch: KVBatchMeta) -> Any:
            output = calls.call(batch)
            return SimpleNamespace(get=lambda: output)

        groups = trainer.critic_wg, trainer.actor_rollout_wg
        trainer.critic_wg = SimpleNamespace(train_mini_batch=train_mini_batch)
        trainer.actor_rollout_wg = SimpleNamespace(update_actor=calls.call)
        try:
            calls.run(jobs)
        finally:
            trainer.critic_wg, trainer.actor_rollout_wg = groups

    def close(self) -> None:
        """Wait for the schedule that is being solved, if one is."""
        self._schedules.wait()

    def _call(self, batches: dict[str, KVBatchMeta]) -> dict[str, Any]:
        schedules = self._schedules.ready()
        order = UpdateOrder(
            bool(schedules), {counts: found.to_json() for counts, found in schedules.items()}, self._timeout
        )
        shares = {
            model: dispatch_lazy_compute_data_proto(_MESH[model], group, batches[model])[0][0]
            for model, group in self._groups.items()
        }
        critic = self._groups["critic"]
        outputs = critic.fused_update(shares["critic"], shares["actor"], [order] * critic.world_size)
        reports: list[RankReport] = [report for _, _, report in outputs]
        self._schedules.learn(reports)
        self._record(reports, [schedules[counts].makespan for counts in reports[0].counts if counts in schedules])
        return {
            model: collect_lazy_compute_data_proto(_MESH[model], self._groups[model], [output[i] for output in outputs])
            for i, model in enumerate(("critic", "actor"))
        }

    def _record(self, reports: list[RankReport], predicted: list[float]) -> None:
        # By each rank's own clock: those of other nodes may differ.
        ops = [[span for span in report.spans if "predicted" not in span.args] for report in reports]
        calls = reports[0].counts
        self.metrics = {
            "fuse/pipeline_calls": float(len(calls)),
            "fuse/pipeline_fused_calls": float(reports[0].fused),
            "fuse/pipeline_seconds": max(max(s.end for s in own) - min(s.start for s in own) for own in ops),
            "fuse/pipeline_predicted_seconds": sum(predicted),
            "fuse/pipeline_schedules_solved": float(self._schedules.solved),
        }
