"""Defines the trainer of mode `fuse`: the steps of verl's synchronous PPO trainer with hook call sites.

The trainer decides when hooks are called, the lane of each collective call, and the records; policies live in plugins.
With every feature off a step is verl's own, plus a timeline, and agent loops are built without Hydra ("observe mode").
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_fuse.errors import FuseError
from verl_fuse.host.inference.stages import old_log_prob_metrics
from verl_fuse.host.record.step import RunStage, StageMethod, StepStage, StockStage
from verl_fuse.host.rollout.policy import plugin_metrics
from verl_fuse.host.run import FuseRun
from verl_fuse.host.start.heap import keep_heap
from verl_fuse.host.upstream.advantages import with_gradient, without_gradient
from verl_fuse.host.upstream.rows import lengths_by_source, response_tokens, tags_of
from verl_fuse.host.upstream.watchdog import with_deadline
from verl_fuse.spec import timeline as names
from verl_fuse.spec.events import Generated, StepBegun, StepEnded
from verl_fuse.spec.step import Stage

# Replicas that do not sleep may take this many seconds to end.
ENDING_SECONDS = 60.0


class FuseTrainer(FuseRun):
    """verl's synchronous trainer, observed and extended through hooks (verl_fuse/hookspecs.py). Its methods are in the
    order in which a step calls them."""

    def on_init_end(self) -> None:
        self.begin_run()
        self._sync_weights(self.lane.call, super().on_init_end)
        keep_heap()

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self.begin_step()
        self.watch.begin_step()
        self.director.begin_step()
        self.journal.emit(StepBegun)

    def prepare_step(self) -> dict:
        self.journal.step.generation_start = self.journal.step.clock.now
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self.director.submit(batch, self.watch)
        return super()._submit_batch_to_rollout(batch)

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.watch.look()

    def on_sample_end(self) -> None:
        step = self.journal.step
        step.spans.append(names.Span(names.GENERATION, names.STEP, "stage", step.generation_start, step.clock.now))
        if failed := self.watch.groups.failed:
            self.replicas.require_one(failed)
        if self.curr_step_profile:
            self.lane.drain()
        with self.journal.stage(names.SLEEP), self.replicas.sleeping():
            # Replicas have deadlines of their own; the end of a profile writes its traces, which may take long.
            core = self.settings.core
            seconds = core.call_timeout if self.curr_step_profile else core.replica_timeout + ENDING_SECONDS
            with_deadline("end of the rollout", seconds, super().on_sample_end, self.replicas.suspects)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        with self.journal.stage(names.DRAIN):
            self.director.finish(tags_of(batch))
            for part in self.parts:
                part.after_inference(self.global_steps)
        with self.journal.stage(names.BALANCE):
            batch = super()._balance_batch(batch, metrics, *args, **kwargs)
            metrics.update(self._account(batch))
        return batch

    def _account(self, batch: KVBatchMeta) -> Mapping[str, float]:
        """Check that the batch is whole and on-policy, write its account, and return its metrics."""
        replay = self.config.skip.rollout_tq
        replayed = bool(replay.enable and self.global_steps in replay.steps)
        responses, prompts = response_tokens(tags_of(batch)), self.director.routing.prompts
        expected = self.journal.step.expected_of(responses.keys(), self.watch.discarded)
        metrics = self.journal.account(self.settings.run_dir, batch, replayed, expected)
        missing = self.journal.step.account.missing
        self.journal.emit(
            Generated, responses=responses, discarded=self.watch.discarded, prompts=prompts, missing=missing
        )
        self.agent_errors.warn(f"step {self.global_steps}", missing)
        return metrics

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("old_log_prob", super()._compute_old_log_prob, self._infer)(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("ref", super()._compute_ref_log_prob, self._infer)(batch, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("values", super()._compute_values, self._infer)(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.journal.stage(names.ADVANTAGE) as said:
            stock = super()._compute_advantage
            batch = StockStage("advantage", stock, stock, self.parts)(batch, metrics)
            self.journal.step.with_gradient = with_gradient(batch)
            shares = without_gradient(batch, self.journal.step.with_gradient)
            said |= shares
        metrics["fuse/zero_gradient_samples"] = shares[names.ZERO_GRADIENT_SAMPLES]
        metrics["fuse/zero_gradient_tokens"] = shares[names.ZERO_GRADIENT_TOKENS]
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("update_critic", super()._update_critic, self._train)(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("update_actor", super()._update_actor, self._train)(batch, metrics)

    def _stage(self, name: StepStage, stock: StageMethod, run: Callable[..., KVBatchMeta]) -> StockStage:
        method = partial(self.call, name, stock)
        return StockStage(name, method, partial(run, name, method), self.parts)

    def call(self, name: StepStage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Do the work of a stage by verl's method `stock`, as the parts have it done."""
        for part in self.parts:
            stock = part.method(name, stock)
        return stock(batch, metrics)

    def _infer(self, stage: Stage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.journal.stage(stage):
            if (inference := self.director.inference_of(stage)) is None:
                return self.lane.call(stage, "inference", partial(stock, batch, metrics))
            whole = partial(old_log_prob_metrics, self.config) if stage == "old_log_prob" else lambda batch: {}
            return inference.complete(stage, batch, metrics, whole)

    def _train(self, stage: StepStage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.run_stage(stage, "train", partial(stock, batch, metrics))

    def on_step_end(self) -> None:
        self._require_replicas()
        self._sync_weights(self.run_stage, super().on_step_end)
        validates = self.config.trainer.test_freq > 0 and self.global_steps % self.config.trainer.test_freq == 0
        if validates or self.global_steps >= self.total_training_steps:
            # Validation waits for it; until then it is time of the step.
            self.settle()
        self.replicas.readmit(self.global_steps)
        self.journal.step.end = self.journal.step.clock.now

    def _require_replicas(self) -> None:
        try:
            self.replicas.require_alive()
        except FuseError:
            frequency = self.config.trainer.save_freq
            last = self.global_steps >= self.total_training_steps
            if frequency > 0 and self.global_steps % frequency and not last:
                self._save_checkpoint()
            raise

    def _sync_weights(self, run: RunStage, stock: Callable[[], None]) -> None:
        def sync() -> None:
            for part in self.parts:
                part.with_weight_sync(self.global_steps)
            self.replicas.sync(stock, self.settings.core.weight_sync_timeout)

        for part in self.parts:
            part.before_weight_sync(self.global_steps)
        run(names.UPDATE_WEIGHTS, "sync", sync)
        for part in self.parts:
            part.after_weight_sync(self.global_steps)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(self.own_metrics(batch))

    def own_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        """Return the metrics of verl-fuse for the step that ends, and tell its observers."""
        timeline = self.journal.timeline(str(self.config.trainer.experiment_name), self.replicas.named)
        metrics, failed = plugin_metrics(self.settings.manager.hook, timeline)
        for part in self.parts:
            metrics.update(part.metrics)
        metrics.update(self.journal.metrics(timeline))
        metrics["fuse/inference_discarded"] = float(self.inference.discarded)
        self.director.policy.fallbacks += failed
        metrics["fuse/fallbacks"] = float(self.director.policy.fallbacks)
        step = self.journal.step
        lengths = lengths_by_source(batch, step.sources)
        self.replicas.learn([pair for rows in lengths.values() for pair in rows])
        samples = step.account.samples
        self.journal.emit(StepEnded, timeline=timeline, samples=samples, lengths=lengths, metrics=metrics)
        return metrics
