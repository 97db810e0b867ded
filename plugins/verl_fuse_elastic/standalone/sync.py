"""Gives standalone replicas the weights of a step beside verl's sync."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

from omegaconf import OmegaConf

from verl_fuse.host.record.step import RunStage, TrainerPart
from verl_fuse.spec.timeline import EXPORT_WHOLE
from verl_fuse_elastic.standalone.pool import StandalonePool


class StandaloneSync(TrainerPart):
    """`export` leaves the whole weights of the training workers, before verl's sync gives the devices' memory back to
    the replicas on them."""

    def __init__(self, pool: StandalonePool, run: RunStage, export: Callable[[], list[Any]]):
        self._pool, self._run, self._export = pool, run, export
        self._weights: list[Any] = []

    def before_weight_sync(self, step: int) -> None:
        self._weights = self._run(EXPORT_WHOLE, "sync", self._export) if self._pool.take_in() else []

    def after_weight_sync(self, step: int) -> None:
        if self._weights:
            self._pool.load(self._weights, step)
        self._weights = []

    def close(self) -> None:
        self._pool.close()


def with_pool(host: Any, groups: Mapping[str, Any], *, most: int, launch_timeout: float) -> StandaloneSync:
    """Return the part of the trainer `host` with which `fuse_scale` may ask for up to `most` replicas more, like those
    on the training devices, with devices of their own; each is created within `launch_timeout` seconds."""
    manager, block = host.llm_server_manager, host.config.actor_rollout_ref
    rollout = deepcopy(block.rollout)
    # The engine is offered the replicas' weights from outside, like verl offers weights on the training devices.
    OmegaConf.update(rollout, "checkpoint_engine.backend", "naive")

    def build(rank: int) -> Any:
        return manager.rollout_replica_class(
            replica_rank=rank, config=rollout, model_config=block.model, gpus_per_node=rollout.n_gpus_per_node
        )

    timeout, recorder = host.settings.core.weight_sync_timeout, host.journal.recorder
    pool = StandalonePool(build, most, host.replicas, recorder, launch_timeout, timeout)
    host.director.routing.use_pool(pool)
    host.client_options["standalone"] = most
    return StandaloneSync(pool, host.run_stage, partial(exported_whole, groups["actor"]))


def exported_whole(actor: Any) -> list[Any]:
    """Return the parameters that the worker group `actor` leaves for standalone replicas, in its order; a collective of
    its workers."""
    turns = zip_longest(*actor.export_whole())
    return [bucket for turn in turns for bucket in turn if bucket is not None]
