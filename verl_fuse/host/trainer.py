"""Defines the trainer of mode `fuse`: verl's synchronous PPO trainer with hook call sites.

The trainer decides when hooks are called, the lane of each collective call, and the records; policies live in plugins.
With every feature off a step is verl's own, plus a timeline, and agent loops are built without Hydra ("observe mode").
"""

from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig
from ray.exceptions import RayError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient

from verl_fuse.errors import FuseError
from verl_fuse.host import assembly
from verl_fuse.host.features import Features
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.stages import old_log_prob_metrics
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.record.accounting import prepare_accounts
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.record.shared import warn_unshared
from verl_fuse.host.record.spans import start_collector
from verl_fuse.host.record.step import RunStage, StageMethod, StepStage, StockStage, TrainerPart
from verl_fuse.host.rollout.agent_errors import AgentErrors
from verl_fuse.host.rollout.agents import build_directly
from verl_fuse.host.rollout.client import FuseLLMServerClient
from verl_fuse.host.rollout.director import Director
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.processes import SampleProcesses
from verl_fuse.host.rollout.prompts import announce
from verl_fuse.host.rollout.transfer import has_connector
from verl_fuse.host.rollout.watch import RolloutWatch
from verl_fuse.host.start.begin import checked_settings
from verl_fuse.host.start.heap import keep_heap
from verl_fuse.host.upstream.advantages import with_gradient, without_gradient
from verl_fuse.host.upstream.checkpoints import resumed_from, saved_at
from verl_fuse.host.upstream.rows import lengths_by_source, response_tokens, tags_of
from verl_fuse.host.upstream.watchdog import with_deadline
from verl_fuse.spec import timeline as names
from verl_fuse.spec.events import CheckpointSaved, Generated, SetUp, StepBegun, StepEnded, TrainingEnded
from verl_fuse.spec.run_config import save_config
from verl_fuse.spec.step import Stage

# Replicas that do not sleep, and rollout profiles, may take this many seconds to end.
ENDING_SECONDS = 60.0


class FuseTrainer(PPOTrainerSync):
    """verl's synchronous trainer, observed and extended through hooks (verl_fuse/hookspecs.py)."""

    def __init__(self, config: DictConfig):
        self.settings = checked_settings(config)
        self.journal = Journal(self.settings.manager.hook, start_collector(), self.settings.planned_seconds)
        super().__init__(config)

    # verl tells modes apart by name (`trainer_mode != "sync"` means an asynchronous replay buffer, queue checkpoints
    # and more); mode `fuse` has synchronous semantics throughout.
    @property
    def trainer_mode(self) -> str:
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, mode: str) -> None:
        if mode != TRAINER_MODE:
            raise FuseError(f"trainer.v1.trainer_mode={mode!r}: FuseTrainer serves {TRAINER_MODE!r} only")

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer, core = super()._build_replay_buffer(), self.settings.core
        if not isinstance(buffer, ReplayBuffer):
            sampler = self.config.trainer.v1.sampler.custom_sampler
            raise FuseError(
                f"trainer.v1.sampler.custom_sampler.name={sampler.name!r} of {sampler.path}: a sampler must be a "
                "subclass of verl's ReplayBuffer"
            )
        self.watch = RolloutWatch(
            buffer,
            core.poll_interval,
            core.stall_timeout,
            self._look,
            self._discard,
            self._suspects,
            self._require_processes,
        )
        return buffer

    def _discard(self, keys: Collection[str]) -> None:
        for each in (*self.director.inferences, *self.parts):
            each.discard(keys)

    def _suspects(self) -> list[str]:
        return [*self.replicas.suspects(), *self.processes.suspects(self.watch.unfinished)]

    def _require_processes(self) -> None:
        self.processes.check(self.watch.now)

    def _look(self, watch: RolloutWatch) -> None:
        for part in self.parts:
            part.check()
        self.director.look(watch)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping |= assembly.worker_classes(self)
        assembly.place_critic(self)

    def _setup(self) -> None:
        super()._setup()
        self.lane = Lane("train", self.journal.recorder, self.settings.core.call_timeout)
        self.inference = assembly.sample_inference(self, super())
        self.replicas = assembly.build_replicas(self)
        policy = PolicyGuard(self.settings.manager.hook)
        self.director = Director(self.journal, policy, self.replicas, self.inference)
        self.parts: list[TrainerPart] = []
        self.client_options: dict[str, Any] = {}

    def get_llm_client(self) -> LLMServerClient:
        replicas = {address: rank for rank, address in self.replicas.addresses.items()}
        return self.llm_server_manager.get_client(FuseLLMServerClient, replicas=replicas, **self.client_options)

    def on_init_end(self) -> None:
        prepare_accounts(self.settings.run_dir)
        warn_unshared(self.settings.run_dir)
        save_config(self.settings.run_dir, self.config)
        self.settings.manager.hook.fuse_setup(trainer=Features(self))
        self._begin_step()
        self.journal.emit(
            SetUp,
            run_dir=self.settings.run_dir,
            resumed_from=resumed_from(self.config, self.global_steps),
            total_steps=self.total_training_steps,
            expected=self.journal.step.expected(),
            groups=self.config.data.train_batch_size,
        )
        self._sync_weights(self.lane.call, super().on_init_end)
        keep_heap()

    def _begin_step(self) -> None:
        prompts, samples_each = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        self.journal.begin_step(self.global_steps, prompts, samples_each)

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._begin_step()
        self.watch.begin_step()
        self.processes.begin_step()
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
        if failed := self.watch.groups[2]:
            self.replicas.require_one(failed)
        if self.curr_step_profile:
            self.lane.drain()
        with self.journal.stage(names.SLEEP), self.replicas.sleeping():
            # Replicas have deadlines of their own; the end of a profile has none.
            seconds = self.settings.core.replica_timeout + ENDING_SECONDS
            with_deadline("end of the rollout", seconds, super().on_sample_end, self.replicas.suspects)

    def _settle(self) -> None:
        for part in self.parts:
            part.settle()

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._settle()
        self.watch.begin_step()
        self.processes.begin_step()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.agent_errors.warn(f"validation after step {self.global_steps}")

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        with self.journal.stage(names.DRAIN):
            self.inference.submit_rest(tags_of(batch))
            self.inference.drain()
            if self.director.apart is not None:
                self.director.apart.inference.finish()
            for part in self.parts:
                part.after_inference(self.global_steps)
        with self.journal.stage(names.BALANCE):
            batch = super()._balance_batch(batch, metrics, *args, **kwargs)
            replay = self.config.skip.rollout_tq
            replayed = bool(replay.enable and self.global_steps in replay.steps)
            responses, prompts = response_tokens(tags_of(batch)), self.director.routing.prompts
            expected = self.journal.step.expected_of(responses.keys(), self.watch.discarded)
            metrics.update(self.journal.account(self.settings.run_dir, batch, replayed, expected))
            missing = self.journal.step.account.missing
            self.journal.emit(
                Generated, responses=responses, discarded=self.watch.discarded, prompts=prompts, missing=missing
            )
            self.agent_errors.warn(f"step {self.global_steps}", missing)
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("old_log_prob", super()._compute_old_log_prob, self._infer)(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("ref", super()._compute_ref_log_prob, self._infer)(batch, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._stage("values", super()._compute_values, self._infer)(batch, metrics)

    def _stage(self, name: StepStage, stock: StageMethod, run: Callable[..., KVBatchMeta]) -> StockStage:
        return StockStage(name, stock, partial(run, name, stock), self.parts)

    def _infer(self, stage: Stage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.journal.stage(stage):
            found = [inference for inference in self.director.inferences if stage in inference.stages]
            if not found:
                return self.lane.call(stage, "inference", partial(stock, batch, metrics))
            whole = partial(old_log_prob_metrics, self.config) if stage == "old_log_prob" else lambda batch: {}
            return found[0].complete(stage, batch, metrics, whole)

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

    def _train(self, stage: StepStage, stock: StageMethod, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.run_stage(stage, "train", partial(stock, batch, metrics))

    def _save_checkpoint(self) -> None:
        self._settle()
        self.run_stage(names.SAVE_CHECKPOINT, "other", super()._save_checkpoint)
        self.journal.emit(CheckpointSaved, folder=saved_at(self.config, self.global_steps))

    def on_step_end(self) -> None:
        self._require_replicas()
        self._sync_weights(self.run_stage, super().on_step_end)
        if self.global_steps >= self.total_training_steps:
            self._settle()
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

    def run_stage(self, name: str, category: names.Category, work: Callable[[], Any], **args: float) -> Any:
        """Run a stage of the step on the lane of the training workers, and record it with `args`."""
        with self.journal.stage(name, "sync" if category == "sync" else "stage", **args):
            return self.lane.call(name, category, work, **args)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(self.own_metrics(batch))

    def own_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        """Return the metrics of verl-fuse for the step that ends, and tell its observers."""
        metrics: dict[str, float] = {}
        timeline = self.journal.timeline(str(self.config.trainer.experiment_name), self.replicas.named)
        for found in self.settings.manager.hook.fuse_metrics(timeline=timeline):
            metrics.update(found or {})
        for part in self.parts:
            metrics.update(part.metrics)
        metrics.update(self.journal.metrics(timeline))
        metrics["fuse/inference_discarded"] = float(self.inference.discarded)
        metrics["fuse/fallbacks"] = float(self.director.policy.fallbacks)
        step = self.journal.step
        lengths = lengths_by_source(batch, step.sources)
        self.replicas.learn([pair for rows in lengths.values() for pair in rows])
        samples = step.account.samples
        self.journal.emit(StepEnded, timeline=timeline, samples=samples, lengths=lengths, metrics=metrics)
        return metrics

    def fit(self, agent_loop_manager: Any) -> None:
        with ExitStack() as closing:
            closing.callback(self.lane.close)
            for part in self.parts:
                closing.callback(part.close)
            timeout = self.settings.core.replica_timeout
            self.processes = SampleProcesses(
                agent_loop_manager, self.get_reward_handles(), timeout, self.watch.submitted
            )
            build_directly(agent_loop_manager, timeout)
            self.agent_errors = AgentErrors(agent_loop_manager, timeout)
            if self.director.routing.by_prompt or has_connector(self.config):
                announce(agent_loop_manager, timeout)
            try:
                super().fit(agent_loop_manager)
            except Exception:
                # A rollout of which nothing is left ends the run, for example.
                # Where Ray is gone, the error itself says more.
                with suppress(RayError):
                    self.agent_errors.warn("the last rollout")
                raise
            # Needed too where the prompts were used up before the last step.
            self._settle()
            self.journal.emit(TrainingEnded)
