"""The trainer of mode `fuse`: verl's synchronous PPO trainer with hook call sites.

It owns when hooks are called, which collective call runs on which lane, and what is recorded; policies live in plugins. With every
feature off a step is verl's own, plus a timeline ("observe mode").
"""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient

from verl_fuse.errors import FuseError
from verl_fuse.host import assembly
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import StageCall, ready_samples
from verl_fuse.host.inference.slices import Slices
from verl_fuse.host.inference.stages import old_log_prob_metrics
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.record.accounting import account, prepare_accounts, recorded
from verl_fuse.host.record.logs import join_verl_log
from verl_fuse.host.record.spans import Recorder, Stopwatch, start_collector
from verl_fuse.host.rollout.client import FuseLLMServerClient
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.prompts import announce, prompts_of, sources_of
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.rollout.routing import Routing
from verl_fuse.host.rollout.standalone.pool import StandalonePool
from verl_fuse.host.rollout.transfer import has_connector
from verl_fuse.host.rollout.watch import Glance, RolloutWatch, sample_of, sessions
from verl_fuse.host.start.applied_plan import apply_plan
from verl_fuse.host.start.compat.start import require_contracts, require_version, warn_of_changes
from verl_fuse.host.start.settings import load_settings
from verl_fuse.host.update.schedules import Solve
from verl_fuse.host.upstream.checkpoints import resumed_from, saved_at
from verl_fuse.host.upstream.rows import lengths_by_source, prompt_indices, response_tokens, tags_of
from verl_fuse.host.upstream.watchdog import with_deadline
from verl_fuse.host.weights.layouts.driver import Layouts
from verl_fuse.host.worker import recording_worker_class
from verl_fuse.spec.events import (
    CheckpointSaved,
    Event,
    Generated,
    Migrated,
    Polled,
    SetUp,
    StageBegun,
    StepBegun,
    StepEnded,
    Submitted,
    TrainingEnded,
)
from verl_fuse.spec.run_config import save_config
from verl_fuse.spec.step import LaneView, Migration, ReplicaView, RolloutView, Stage
from verl_fuse.spec.timeline import Category, Span, Timeline

logger = logging.getLogger(__name__)

# Seconds that replicas which do not sleep, and rollout profiles, may take to end.
ENDING_SECONDS = 60.0
# Stages of ours that verl's timers leave out: they lie between those of verl.
UNTIMED = ("drain", "balance", "export_whole")


class FuseTrainer(PPOTrainerSync):
    """verl's synchronous trainer, observed and extended through hooks (verl_fuse/hookspecs.py)."""

    _routing: Routing | None = None
    _layouts: Layouts | None = None
    _warm_prefix_tokens: int | None = None
    _standalone: StandalonePool | None = None

    def __init__(self, config: DictConfig):
        require_version()
        self.settings = load_settings(config)
        join_verl_log(self.settings.manager)
        for change in apply_plan(config, self.settings.overrides):
            logger.warning(change)
        warn_of_changes(require_contracts(self.settings.manager, config))
        self.hook = self.settings.manager.hook
        self._spans: list[Span] = []
        self.recorder = Recorder(self._spans.append)
        self._collector = start_collector()
        self._policy = PolicyGuard(self.hook)
        self._unwritten_accounts = 0
        super().__init__(config)

    # verl tells modes apart by name (`trainer_mode != "sync"` means an asynchronous replay buffer, queue checkpoints and more);
    # ours has synchronous semantics throughout.
    @property
    def trainer_mode(self) -> str:
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, mode: str) -> None:
        if mode != TRAINER_MODE:
            raise FuseError(f"trainer.v1.trainer_mode={mode!r}: FuseTrainer serves {TRAINER_MODE!r} only")

    # ------------------------------------------------------------------ set-up

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        core = self.settings.core
        self._glance = Glance()
        self._watch = RolloutWatch(
            buffer, core.poll_interval, core.stall_timeout, self._on_poll, lambda: self.replicas.suspects()
        )
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, remote_class in self.role_worker_mapping.items():
            kind = "actor" if role in assembly.ACTOR_ROLES else "critic" if role is Role.Critic else None
            if kind is not None:
                stock = remote_class.__ray_actor_class__
                worker_class = self.hook.fuse_worker_class(model=kind, base=stock, config=self.config) or stock
                self.role_worker_mapping[role] = ray.remote(recording_worker_class(kind, worker_class))

    def get_llm_client(self) -> LLMServerClient:
        replicas = {address: rank for rank, address in self.replicas.addresses.items()}
        most = self._standalone.most if self._standalone else 0
        prefix = self._warm_prefix_tokens
        return self.llm_server_manager.get_client(
            FuseLLMServerClient, replicas=replicas, standalone=most, warm_prefix_tokens=prefix
        )

    def _setup(self) -> None:
        super()._setup()
        self._resources = ExitStack()
        self._lane = Lane("train", self.recorder, self.settings.core.call_timeout)
        self._resources.callback(self._lane.close)
        self._inference = assembly.sample_inference(self, self._lane, self._stage_calls())
        self._slices: Slices | None = None
        self._fused: Any = None
        self._actor_updated = False
        self._sources: dict[str, str] = {}
        rollout = self.config.actor_rollout_ref.rollout
        self.replicas = Replicas(
            self.llm_server_manager,
            self.checkpoint_manager,
            self.recorder,
            self.settings.core.replica_timeout,
            max_num_seqs=rollout.max_num_seqs,
            sequence_tokens=rollout.prompt_length + rollout.response_length,
        )

    def _stage_calls(self) -> dict[Stage, StageCall]:
        return {
            "old_log_prob": super()._compute_old_log_prob,
            "ref": super()._compute_ref_log_prob,
            "values": super()._compute_values,
        }

    @property
    def streamed_stages(self) -> tuple[Stage, ...]:
        """The stages finished samples go through; none where verl computes nothing of them before the batch is complete."""
        return assembly.stages_of(self)

    @property
    def devices_each(self) -> int:
        """Devices of one rollout replica."""
        return self.replicas.devices_each

    def block(self, plugin: str) -> Any:
        """The block `fuse.<plugin>`."""
        return self.settings.blocks[plugin]

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Every rollout replica there is."""
        return self.replicas.views()

    def use_slices(self) -> None:
        """For plugins, at `fuse_setup`: inference runs on slices, as replicas are released. Needs `streamed_stages`."""
        self._slices = assembly.build_slices(self)
        self._resources.callback(self._slices.close)
        lanes = self._slices.lanes(assembly.extra_info(self))
        self._inference = assembly.sample_inference(self, self._lane, self._stage_calls(), lanes)

    def use_routing(self, warm_prefix_tokens: int | None) -> None:
        """For plugins, at `fuse_setup`: `fuse_predict`, `fuse_scale` and `fuse_assign` are asked before each batch is submitted."""
        self._routing = Routing(self.llm_server_manager, self.replicas, self.settings.core.replica_timeout)
        self._warm_prefix_tokens = warm_prefix_tokens

    def use_standalone(self, most: int, launch_timeout: float) -> None:
        """For plugins, after `use_routing`: `fuse_scale` may ask for up to `most` replicas more, each created within `launch_timeout` seconds."""
        assert self._routing is not None, "standalone replicas need use_routing"
        self._standalone = assembly.build_standalone(self, most, launch_timeout)
        self._resources.callback(self._standalone.close)
        self._routing.use_pool(self._standalone)

    def use_fused_update(self, solve: Solve, timeout: float) -> None:
        """For plugins, at `fuse_setup`: critic and actor are updated in one call, in the order of the schedule that `solve` finds."""
        # What it rests on comes with the extra `megatron`.
        from verl_fuse.host.update.fused import FusedUpdate

        self._fused = FusedUpdate(assembly.training_groups(self), solve, timeout, self.recorder)
        self._resources.callback(self._fused.close)

    def use_layouts(self, wanted: Callable[[int], Mapping[str, int]]) -> None:
        """For plugins, at `fuse_setup`: each model is trained with the `fsdp_size` that `wanted` says for a step, changed between two steps."""
        self._layouts = Layouts(assembly.training_groups(self), wanted)

    @contextmanager
    def _refreshed_slices(self) -> Iterator[None]:
        """Slices get the weights of this step, which the enclosed gives to replicas. Nobody waits: the lane has nothing else to do while the next step
        generates, and slices begin when replicas are released. Only what needs a device's memory for that is done while the replicas still sleep."""
        first = assembly.exports_on_devices(self.config)
        if first:
            self._refresh_slices()
        yield
        if not first:
            self._refresh_slices()

    def _refresh_slices(self) -> None:
        if self._slices is not None:
            read = partial(assembly.exported, self, self._inference.stages)
            export = partial(self._lane.recorded, "export_weights", "sync", read)
            self._slices.load(self._lane.submit(export, "export_weights"))

    def on_init_end(self) -> None:
        prepare_accounts(self.settings.run_dir)
        save_config(self.settings.run_dir, self.config)
        self.hook.fuse_setup(trainer=self)
        self._emit(
            SetUp,
            run_dir=self.settings.run_dir,
            resumed_from=resumed_from(self.config, self.global_steps),
            total_steps=self.total_training_steps,
            expected=self._expected_samples,
            groups=self.config.data.train_batch_size,
        )
        with self._refreshed_slices():
            self._lane.call("update_weights", "sync", partial(self._sync_weights, super().on_init_end))

    @property
    def _expected_samples(self) -> int:
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    # ------------------------------------------------------------------ the rollout

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._spans.clear()
        self._sources = {}
        self._inference.begin_step()
        self._watch.begin_step()
        if self._routing is not None:
            self._routing.begin_step()
        self._policy.begin_step(self.global_steps)
        self._clock = Stopwatch()
        self._emit(StepBegun)

    def prepare_step(self) -> dict:
        self._generation_start = self._clock.now
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        begins = not self._sources
        self._sources |= sources_of(batch)
        self._emit(Submitted, prompts=Counter(self._sources.values()))
        self.replicas.expect(self._expected_samples)
        if self._routing is not None:
            prompts = prompts_of(batch, self.config.actor_rollout_ref.rollout.n)
            if begins:
                self._routing.plan(prompts, self._policy)
            else:
                self._routing.add(prompts, self._policy, self._watch.tags, self._watch.discarded)
        return super()._submit_batch_to_rollout(batch)

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self._watch.look()

    def on_sample_end(self) -> None:
        self._spans.append(Span("gen", "step", "stage", self._generation_start, self._clock.now))
        if failed := self._watch.groups[2]:
            self.replicas.require_one(failed)
        if self.curr_step_profile:
            self._lane.drain()
        with self._stage("sleep"), self.replicas.sleeping():
            # Replicas have deadlines of their own; the end of a profile has none.
            seconds = self.settings.core.replica_timeout + ENDING_SECONDS
            with_deadline("end of the rollout", seconds, super().on_sample_end, self.replicas.suspects)

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._watch.begin_step()

    def _on_poll(self, watch: RolloutWatch) -> None:
        tags = watch.tags
        self._inference.check()
        if not self._glance.due((len(tags), *watch.groups, self._lanes)):
            return
        self._expect(watch, tags)
        view = self._view(watch, tags, self.replicas.watched())
        self._emit(Polled, view=view)
        if migration := self._policy.migration(view):
            self._migrate(migration, view)
            view = self._view(watch, tags, self.replicas.views())
        for number in range(len(view.lanes)):
            while keys := self._policy.infer_next(view, view.lanes[number]):
                self._inference.submit(keys, tags, view.lanes[number].name)
                view = self._view(watch, tags, view.replicas)

    def _expect(self, watch: RolloutWatch, tags: Mapping[str, dict]) -> None:
        """How long the samples that the finished trajectories leave will be decides for how many of them a replica
        has room."""
        upper = None if self._routing is None else self._routing.upper_response(tags, watch.discarded)
        lengths = [(int(tag["prompt_len"]), int(tag["response_len"])) for tag in tags.values()]
        self.replicas.expect(max(0, self._expected_samples - sessions(tags)), lengths, upper)

    @property
    def _lanes(self) -> tuple[LaneView, ...]:
        return self._inference.view(None if self._slices is None else self.replicas.freed)

    def _migrate(self, migration: Migration, view: RolloutView) -> None:
        freed = sorted({seen.rank for seen in view.replicas if seen.routed} - set(migration.survivors))
        moving = any(seen.running for seen in view.replicas if seen.rank in freed)
        if moving and not self.replicas.all_live(migration.survivors):
            return
        self.replicas.free(freed, migration.cause)
        stopped = tuple(rank for rank in freed if rank in self.replicas.freed)
        self._emit(Migrated, view=view, survivors=migration.survivors, freed=stopped)

    def _view(self, watch: RolloutWatch, tags: Mapping[str, dict], replicas: tuple[ReplicaView, ...]) -> RolloutView:
        groups, finished, failed = watch.groups
        if self._routing is not None:
            replicas = self._routing.annotate(replicas, tags, watch.discarded)
        return RolloutView(
            step=self.global_steps,
            elapsed=self._clock.now - self._clock.start,
            expected=self._expected_samples,
            finished=sessions(tags),
            groups=groups,
            groups_finished=finished + failed,
            ready=ready_samples(tags, self._inference.taken, sample_of),
            lanes=self._lanes,
            replicas=replicas,
        )

    # ------------------------------------------------------------------ stages

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        with self._stage("drain"):
            if self._slices is not None:
                self._inference.submit_rest(tags_of(batch))
            self._inference.drain()
        with self._stage("balance"):
            batch = super()._balance_batch(batch, metrics, *args, **kwargs)
            version = None if self._replayed else self.global_steps - 1
            self._account = account(self.global_steps, batch.keys, batch.tags, self._expected_samples, version)
            self._unwritten_accounts += not recorded(self.settings.run_dir, self._account, prompt_indices(batch))
            prompts = {} if self._routing is None else self._routing.prompts
            responses = response_tokens(tags_of(batch))
            self._emit(Generated, responses=responses, discarded=self._watch.discarded, prompts=prompts)
            metrics.update(self._account.metrics())
        return batch

    @property
    def _replayed(self) -> bool:
        replay = self.config.skip.rollout_tq
        return bool(replay.enable and self.global_steps in replay.steps)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._barrier("old_log_prob", batch, metrics, super()._compute_old_log_prob)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._barrier("ref", batch, metrics, super()._compute_ref_log_prob)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._barrier("values", batch, metrics, super()._compute_values)

    def _barrier(self, stage: Stage, batch: KVBatchMeta, metrics: dict, stock: Any) -> KVBatchMeta:
        with self._stage(stage):
            if stage not in self._inference.stages:
                return self._lane.call(stage, "inference", lambda: stock(batch, metrics))
            whole = partial(old_log_prob_metrics, self.config) if stage == "old_log_prob" else lambda batch: {}
            return self._inference.complete(stage, batch, metrics, whole)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._stage("adv"):
            return super()._compute_advantage(batch, metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._fused is None or self.config.trainer.critic_warmup > self.global_steps:
            return self._on_lane("update_critic", "train", partial(super()._update_critic, batch, metrics))
        # Both methods write what their workers should know into the batch they get.
        own = {
            model: dataclasses.replace(batch, extra_info=dict(batch.extra_info or {})) for model in ("actor", "critic")
        }
        jobs = {
            "actor": partial(super()._update_actor, own["actor"], metrics),
            "critic": partial(super()._update_critic, own["critic"], metrics),
        }
        self._on_lane("fused_update", "train", partial(self._fused.run, self, jobs))
        metrics.update(self._fused.metrics)
        self._actor_updated = True
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._actor_updated:
            self._actor_updated = False
            return batch
        return self._on_lane("update_actor", "train", partial(super()._update_actor, batch, metrics))

    def _save_checkpoint(self) -> None:
        self._on_lane("save_checkpoint", "other", super()._save_checkpoint)
        self._emit(CheckpointSaved, folder=saved_at(self.config, self.global_steps))

    def on_step_end(self) -> None:
        self._require_replicas()
        with self._refreshed_slices():
            weights = self._whole_weights()
            self._on_lane("update_weights", "sync", partial(self._sync_weights, super().on_step_end))
            if self._standalone is not None and weights is not None:
                self._standalone.load(weights, self.global_steps)
            self.replicas.readmit(self.global_steps)
        self._step_end = self._clock.now

    def _whole_weights(self) -> list[Any] | None:
        """What standalone replicas load, if there are any: left before verl's sync, which gives the devices' memory back to the replicas on them."""
        if self._standalone is None or not self._standalone.take_in():
            return None
        return self._on_lane("export_whole", "sync", partial(assembly.exported_whole, self.actor_rollout_wg))

    def _require_replicas(self) -> None:
        try:
            self.replicas.require_alive()
        except FuseError:
            frequency = self.config.trainer.save_freq
            last = self.global_steps >= self.total_training_steps
            if frequency > 0 and self.global_steps % frequency and not last:
                self._save_checkpoint()
            raise

    def _sync_weights(self, stock: Callable[[], None]) -> None:
        if self._layouts is not None:
            self._layouts.enter(self.global_steps + 1)
        self.replicas.sync(stock, self.settings.core.weight_sync_timeout)

    # ------------------------------------------------------------------ the record

    def _on_lane(self, name: str, category: Category, work: Any) -> Any:
        with self._stage(name, "sync" if category == "sync" else "stage"):
            return self._lane.call(name, category, work)

    @contextmanager
    def _stage(self, name: str, category: Category = "stage") -> Iterator[None]:
        self._emit(StageBegun, name=name)
        with self.recorder.span(name, "step", category):
            yield

    def _emit(self, kind: type[Event], **fields: Any) -> None:
        self.hook.fuse_event(event=kind(self.global_steps, time.time(), **fields))

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        timeline = self._timeline()
        for found in self.hook.fuse_metrics(timeline=timeline):
            metrics.update(found or {})
        metrics.update({} if self._layouts is None else self._layouts.metrics)
        for span in timeline.on("step"):
            if span.name in UNTIMED:
                metrics[f"timing_s/{span.name}"] = span.end - span.start
        metrics["fuse/account_write_failures"] = float(self._unwritten_accounts)
        metrics["fuse/fallbacks"] = float(self._policy.fallbacks)
        lengths = lengths_by_source(batch, self._sources)
        self.replicas.learn([pair for rows in lengths.values() for pair in rows])
        self._emit(StepEnded, timeline=timeline, samples=self._account.samples, lengths=lengths)

    def _timeline(self) -> Timeline:
        remote: list[Span] = ray.get(self._collector.drain.remote(), timeout=60)
        start, end = self._clock.start, self._step_end
        spans = [self.replicas.named(s) for s in (*self._spans, *remote) if s.end > start and s.start < end]
        return Timeline(str(self.config.trainer.experiment_name), self.global_steps, start, end, tuple(spans))

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            if self._routing is not None or has_connector(self.config):
                announce(agent_loop_manager, self.settings.core.replica_timeout)
            super().fit(agent_loop_manager)
            self._emit(TrainingEnded)
        finally:
            self._resources.close()
