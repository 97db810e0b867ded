"""Slices: the devices of each rollout replica with a worker group of their own, which computes finished samples once
the replica is free.

Each slice is a world of its own, so a call on one waits for no other, and each has its own lane.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup, split_resource_pool

from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.samples import SliceLane
from verl_fuse.host.inference.stages import READ_FIELDS
from verl_fuse.host.record.spans import Recorder
from verl_fuse.host.upstream.dispatch import data_parallel_size
from verl_fuse.host.upstream.rows import rows
from verl_fuse.host.weights.exports import Export
from verl_fuse.spec.step import Stage
from verl_fuse_interstage.slices.worker import MESH, SliceWorker


@dataclass(frozen=True)
class SliceSetup:
    """`config` is the whole configuration, `critic` what verl gives the critic's workers, `micro_batch` the samples of
    a rank's share that a batch must be a multiple of."""

    config: DictConfig
    critic: Any
    stages: tuple[Stage, ...]
    micro_batch: int
    multimodal: bool


class Slices:
    """One slice per replica, in order of replica rank; `pool` is the actor's resource pool, `size` the devices of a
    replica."""

    def __init__(self, setup: SliceSetup, pool: Any, size: int, recorder: Recorder, timeout: float):
        self._setup = setup
        self._timeout = timeout
        self._fields = [*READ_FIELDS, *(["multi_modal_inputs"] if setup.multimodal else [])]
        self._groups = [
            self._group(number, part) for number, part in enumerate(split_resource_pool(pool, split_size=size))
        ]
        self._lanes = [Lane(f"slice {number}", recorder, timeout) for number in range(len(self._groups))]
        for lane, group in zip(self._lanes, self._groups, strict=True):
            lane.submit(group.init_model, "init_model")
        for lane in self._lanes:
            lane.drain()

    def _group(self, number: int, pool: Any) -> Any:
        config = self._setup.config
        worker = RayClassWithInitArgs(
            cls=ray.remote(SliceWorker),
            config=config.actor_rollout_ref,
            stages=self._setup.stages,
            critic=self._setup.critic,
            number=number,
            engines={
                "response_logits": bool(OmegaConf.select(config, "fuse.update.response_logits")),
                "shared_prompts": bool(OmegaConf.select(config, "fuse.update.share_prompts")),
            },
        )
        return RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=worker,
            name_prefix=f"verl_fuse_slice{number}",
            device_name=config.trainer.device,
        )

    def lanes(self, extra_info: Mapping[str, Any]) -> tuple[SliceLane, ...]:
        """Return the slices as lanes for inference."""
        sizes = [data_parallel_size(group, MESH) for group in self._groups]
        return tuple(
            SliceLane(lane, partial(self._infer, group, dict(extra_info)), dp_size, dp_size * self._setup.micro_batch)
            for lane, group, dp_size in zip(self._lanes, self._groups, sizes, strict=True)
        )

    def _infer(
        self, group: Any, extra_info: Mapping[str, Any], keys: Sequence[str], tags: Mapping, stages: Sequence[Stage]
    ) -> None:
        # As one text: verl takes a list for one value per row.
        batch = rows(keys, tags, {**extra_info, "stages": " ".join(stages)})
        batch.fields = list(self._fields)
        group.infer(batch)

    def load(self, weights: "Future[Mapping[Stage, Export]]") -> None:
        """Let every slice take over new weights once they are there, before whatever it is given next; does not
        wait."""
        for lane, group in zip(self._lanes, self._groups, strict=True):
            lane.submit(lambda group=group: group.load_weights(dict(weights.result(self._timeout))), "load_weights")

    def release_memory(self) -> None:
        """Let every slice give back the device's memory that it does not use, and wait for that."""
        for lane, group in zip(self._lanes, self._groups, strict=True):
            lane.submit(partial(lane.recorded, "release_memory", "other", group.release_memory), "release_memory")
        self.drain()

    def drain(self) -> None:
        """Wait for all slices."""
        for lane in self._lanes:
            lane.drain()

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in self._lanes:
            lane.close()
