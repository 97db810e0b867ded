"""A run of mode `fuse` from its start to its end: what the trainer of its steps (trainer.py) is made of."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from omegaconf import DictConfig
from ray.exceptions import RayError
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient

from verl_fuse.errors import FuseError
from verl_fuse.host import assembly
from verl_fuse.host.features import Features
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.record.accounting import prepare_accounts
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.record.shared import warn_unshared
from verl_fuse.host.record.spans import start_collector
from verl_fuse.host.record.step import TrainerPart
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
from verl_fuse.host.upstream.checkpoints import resumed_from, saved_at
from verl_fuse.spec import timeline as names
from verl_fuse.spec.events import CheckpointSaved, SetUp, TrainingEnded
from verl_fuse.spec.run_config import save_config


class FuseRun(PPOTrainerSync):
    """verl's synchronous trainer with a journal, a watch, a director, and the parts of the features that are on."""

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
        self.watch = RolloutWatch(buffer, core.poll_interval, core.stall_timeout)
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping |= assembly.worker_classes(self)
        assembly.place_critic(self)

    def _setup(self) -> None:
        super()._setup()
        self.lane = Lane("train", self.journal.recorder, self.settings.core.call_timeout)
        self.inference = assembly.sample_inference(self, super())
        self.replicas = assembly.build_replicas(self)
        self.parts: list[TrainerPart] = []
        policy = PolicyGuard(self.settings.manager.hook)
        self.director = Director(self.journal, policy, self.replicas, self.inference, self.parts)
        self.watch.observers.append(self.director)
        self.client_options: dict[str, Any] = {}

    def get_llm_client(self) -> LLMServerClient:
        replicas = {address: rank for rank, address in self.replicas.addresses.items()}
        return self.llm_server_manager.get_client(FuseLLMServerClient, replicas=replicas, **self.client_options)

    def begin_run(self) -> None:
        """Set the features up, and tell the observers."""
        prepare_accounts(self.settings.run_dir)
        warn_unshared(self.settings.run_dir)
        save_config(self.settings.run_dir, self.config)
        self.settings.manager.hook.fuse_setup(trainer=Features(self))
        self.begin_step()
        self.journal.emit(
            SetUp,
            run_dir=self.settings.run_dir,
            resumed_from=resumed_from(self.config, self.global_steps),
            total_steps=self.total_training_steps,
            expected=self.journal.step.expected(),
            groups=self.config.data.train_batch_size,
        )

    def begin_step(self) -> None:
        """Begin the step of the global number in the journal."""
        prompts, samples_each = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        self.journal.begin_step(self.global_steps, prompts, samples_each)

    def run_stage(self, name: str, category: names.Category, work: Callable[[], Any], **args: float) -> Any:
        """Run a stage of the step on the lane of the training workers, and record it with `args`."""
        with self.journal.stage(name, "sync" if category == "sync" else "stage", **args):
            return self.lane.call(name, category, work, **args)

    def settle(self) -> None:
        """Wait for work of the parts that still runs for an earlier stage."""
        for part in self.parts:
            part.settle()

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self.settle()
        self.watch.begin_step()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.agent_errors.warn(f"validation after step {self.global_steps}")

    def _save_checkpoint(self) -> None:
        self.settle()
        self.run_stage(names.SAVE_CHECKPOINT, "other", super()._save_checkpoint)
        self.journal.emit(CheckpointSaved, folder=saved_at(self.config, self.global_steps))

    def fit(self, agent_loop_manager: Any) -> None:
        with ExitStack() as closing:
            closing.callback(self.lane.close)
            for part in self.parts:
                closing.callback(part.close)
            timeout = self.settings.core.replica_timeout
            rewards = self.get_reward_handles()
            self.watch.observers.append(SampleProcesses(agent_loop_manager, rewards, timeout, self.watch.submitted))
            build_directly(agent_loop_manager, timeout)
            self.agent_errors = AgentErrors(agent_loop_manager, timeout)
            needed = self.director.routing.by_prompt or has_connector(self.config)
            announce(agent_loop_manager, timeout, needed=needed)
            try:
                super().fit(agent_loop_manager)
            except Exception:
                # A rollout of which nothing is left ends the run, for example.
                # Where Ray is gone, the error itself says more.
                with suppress(RayError):
                    self.agent_errors.warn("the last rollout")
                raise
            # Needed too where the prompts were used up before the last step.
            self.settle()
            self.journal.emit(TrainingEnded)
