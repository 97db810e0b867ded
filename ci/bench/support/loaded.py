"""Run the trainer of mode `fuse` over engines that take a given time (engines.py), for the bench `load`."""

import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from ci.bench.support.engines import Engines, EngineServer
from ci.bench.support.untrained import STAGES, UntrainedFeatures, UntrainedTrainer
from verl_fuse.cli.composition import compose
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import SampleInference, SliceLane
from verl_fuse.host.inference.stages import STAGE_FIELDS
from verl_fuse.host.record.accounting import prepare_accounts
from verl_fuse.host.rollout.director import Director
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.start.heap import keep_heap
from verl_fuse.spec.events import SetUp

SAMPLES_EACH = 8
# The number of training ranks, and of devices of a replica.
RANKS = 8


class EngineReplica(RolloutReplica):
    """A replica whose server is an EngineServer."""

    # A call of a server waits behind no request.
    max_concurrency = 1 << 20

    def __init__(self, actor: Any, rank: int):
        self.replica_rank = rank
        self._server_address = f"server-{rank}"
        self._server_handle = EngineServer(actor, rank)
        self.servers = [self._server_handle]

    @property
    def world_size(self) -> int:
        return RANKS

    async def launch_servers(self) -> None:
        """Do nothing: the server is up."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict:
        return await self.servers[0].abort_all_requests.remote(reject_request=reject_request)


class EngineManager:
    """The part of verl's LLMServerManager and AgentLoopManager that the trainer uses."""

    def __init__(self, count: int):
        self.engines = ray.remote(num_cpus=0, max_concurrency=1000)(Engines).remote(count)
        self._replicas = [EngineReplica(self.engines, rank) for rank in range(count)]
        servers = {replica.server_address: replica.server_handle for replica in self._replicas}
        # `elastic` puts a load balancer of verl-fuse in its place.
        self.global_load_balancer = self._stock = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers)

    def get_replicas(self) -> list[EngineReplica]:
        return self._replicas

    def get_addresses(self) -> list[str]:
        return [replica.server_address for replica in self._replicas]

    def close(self) -> None:
        ours = [] if self.global_load_balancer is self._stock else [self.global_load_balancer]
        for actor in (self.engines, self._stock, *ours):
            ray.kill(actor)

    def pace(self, seconds: float) -> None:
        """Set the seconds of a token, from now on."""
        ray.get(self.engines.take.remote(seconds))

    def moved(self) -> int:
        """Return the number of requests that the last step moved."""
        return ray.get(self.engines.counted.remote())

    def generate_sequences(self, batch: TensorDict) -> None:
        lengths = batch["lengths"].tolist()
        uids = [str(uid) for uid in batch["uid"]]
        ray.get(self.engines.begin.remote(self.global_load_balancer, uids, lengths, batch["global_steps"]))


class LoadTrainer(UntrainedTrainer):
    """FuseTrainer from the begin of a step to its batch, with accounts and metrics."""

    def __init__(self, config: DictConfig, manager: EngineManager, meter: Any, collector: Any):
        super().__init__(config, 1, collector, RANKS, manager.get_replicas())
        prepare_accounts(self.settings.run_dir)
        self.manager = self.llm_server_manager = self.agent_loop_manager = manager
        self.lane = Lane("train", self.journal.recorder, 600.0)
        self._slice_lanes = [
            Lane(f"slice {rank}", self.journal.recorder, 600.0) for rank in range(len(manager.get_replicas()))
        ]
        self.inference = self._inference()
        self.replicas = Replicas(
            manager, self.checkpoint_manager, self.journal.recorder, 300.0, max_num_seqs=1024, sequence_tokens=33_280
        )
        hook = self.settings.manager.hook
        self.direct(Director(self.journal, PolicyGuard(hook), self.replicas, self.inference, self.parts))
        self.client_options = {}
        hook.fuse_setup(trainer=UntrainedFeatures(self))
        self.begin_step()
        self.journal.emit(
            SetUp,
            run_dir=self.settings.run_dir,
            resumed_from=None,
            total_steps=self.total_training_steps,
            expected=self.journal.step.expected(),
            groups=config.data.train_batch_size,
        )
        self._measure(meter)
        keep_heap()

    def _measure(self, meter: Any) -> None:
        buffer, director, watch = self.replay_buffer, self.director, self.watch
        buffer._sync_metadata_from_transfer_queue = meter.of("poll", buffer._sync_metadata_from_transfer_queue)
        director.submit = meter.of("plan", director.submit)
        watch._look = meter.of("decide", watch._look)
        director.migrate = meter.of("migrate", director.migrate)
        self._accounted = meter.of("account", self._accounted)

    def _inference(self) -> SampleInference:
        def nothing(*arguments: Any) -> None:
            """Do nothing: there is no model."""

        inference = SampleInference(
            self.lane,
            dict.fromkeys(STAGES, nothing),
            dp_size=RANKS,
            multiples=dict.fromkeys(STAGES, RANKS),
            fields=STAGE_FIELDS,
            extra_info={"temperature": 1.0},
        )
        inference.use_slices([SliceLane(lane, nothing, 1, 1) for lane in self._slice_lanes])
        return inference

    def ask_for(self, lengths: np.ndarray) -> None:
        """Set the response lengths of the next step."""
        self._lengths = lengths

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        count = len(self._lengths)

        def column(values: Any) -> np.ndarray:
            filled = np.empty(count, object)
            filled[:] = values
            return filled

        batch = tu.get_tensordict(
            {
                "uid": column([str(uuid.uuid4()) for _ in range(count)]),
                "raw_prompt": column([[{"role": "user", "content": f"problem {n}"}] for n in range(count)]),
                "data_source": column(["load"] * count),
                "lengths": torch.tensor(self._lengths),
            }
        )
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def run(self) -> dict[str, Any]:
        """Run one step without its models, and return its metrics."""
        self.on_step_begin()
        self.prepare_step()
        self.on_sample_begin()
        prompts = self.config.data.train_batch_size
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="train", batch_size=prompts)
        self.on_sample_end()
        metrics = self._accounted(batch)
        tq.kv_clear(keys=batch.keys, partition_id="train")
        self.global_steps += 1
        return metrics

    def _accounted(self, batch: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        batch = self._balance_batch(batch, metrics)
        self.on_step_end()
        metrics.update(self.own_metrics(batch))
        return metrics

    def close(self) -> None:
        for lane in (self.lane, *self._slice_lanes):
            lane.close()
        self.manager.close()


def balancing_measured(meter: Any) -> AbstractContextManager:
    """Count verl's balancing of a batch over ranks as "balance" in the block."""
    balance = trainer_base.get_seqlen_balanced_partitions
    return mock.patch.object(trainer_base, balance.__name__, meter.of("balance", balance))


def loaded_trainer(folder: Path, replicas: int, prompts: int, meter: Any, collector: Any) -> LoadTrainer:
    """Return a trainer of steps of `prompts` prompts, whose files are in `folder`; `meter` measures its parts,
    `collector` gets all spans."""
    config = compose(
        find_recipe("ppo-cpu"),
        [
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"critic.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.rollout.n={SAMPLES_EACH}",
            f"fuse.run_dir={folder}",
            "fuse.observe.progress=false",
            "fuse.interstage.enabled=true",
            "fuse.interstage.layout=slices",
            "fuse.interstage.migration_threshold=0.1",
            "fuse.elastic.enabled=true",
        ],
    )
    OmegaConf.resolve(config)
    return LoadTrainer(config, EngineManager(replicas), meter, collector)
