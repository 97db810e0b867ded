"""Make a trainer of mode `fuse` without worker groups and models, and the Ray that the trainer needs: for steps whose
replicas are no engines and whose rows nobody trains on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
import transfer_queue as tq
import verl.trainer.ppo.v1  # noqa: F401  Registers verl-fuse's trainer, which must not be half imported.
from omegaconf import DictConfig, OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineManager

from verl_fuse.host.features import Features
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.rollout.agent_errors import AgentErrors
from verl_fuse.host.rollout.director import Director
from verl_fuse.host.start.settings import load_settings
from verl_fuse.host.trainer import FuseTrainer
from verl_fuse.spec.memory import RankMemory
from verl_fuse_interstage.plugin import slices

STAGES = ("old_log_prob", "ref", "values")


@contextmanager
def local_cluster(variables: dict[str, str], object_store_bytes: int) -> Iterator[None]:
    """Start Ray on this machine, whose processes have these environment variables, and a TransferQueue; both end with
    the block."""
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=object_store_bytes,
        runtime_env={"env_vars": variables},
    )
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        try:
            yield
        finally:
            tq.close()
    finally:
        ray.shutdown()


class VersionCheckpoints(CheckpointEngineManager):
    """verl's manager, which syncs only the version of the weights to replicas without models."""

    def update_weights(self, global_steps: int | None = None) -> None:  # pyright: ignore
        ray.get([replica.server_handle.set_global_steps.remote(global_steps) for replica in self.replicas])


class UntrainedFeatures(Features):
    """The features of a trainer whose slices are there from the start, and have no weights; nothing is trained."""

    def training_memory(self) -> dict[str, list[RankMemory]]:
        return {model: [RankMemory("here", 1, None, (), 1, 0, 0, 0)] for model in ("actor", "critic")}

    def add_part(self, make: Any) -> None:
        if getattr(make, "func", None) is not slices:
            super().add_part(make)


class UntrainedTrainer(FuseTrainer):
    """The parts that FuseTrainer's own `__init__` makes beside worker groups; the subclass has the inference and the
    director."""

    def __init__(self, config: DictConfig, step: int, collector: Any, ranks: int, replicas: Sequence[Any]):
        self.config, self.global_steps = config, step
        self.settings = load_settings(config)
        self.journal = Journal(self.settings.manager.hook, collector)
        self.use_critic = self.use_reference_policy = True
        self.ref_in_actor = self.curr_step_profile = False
        self.timing_raw: dict[str, float] = {}
        self.total_training_steps = 1_000_000
        self.tokenizer = SimpleNamespace(eos_token_id=1)
        # The balancing of a batch reads only the number of ranks from this group.
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
        self.replay_buffer = self._build_replay_buffer()
        backend = SimpleNamespace(backend="naive", custom_backend_module=None)
        self.checkpoint_manager = VersionCheckpoints(backend, actor_wg=None, replicas=list(replicas))
        self.agent_errors = AgentErrors(None, 0.0)
        self.parts: list[Any] = []

    def direct(self, director: Director) -> None:
        """Have the rollout directed."""
        self.director = director
        self.watch.observers.append(director)
