"""Gives standalone replicas the weights of a step beside verl's sync."""

from collections.abc import Callable
from typing import Any

from verl_fuse.host.record.step import RunStage, TrainerPart
from verl_fuse.host.rollout.standalone.pool import StandalonePool
from verl_fuse.spec.timeline import EXPORT_WHOLE


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
