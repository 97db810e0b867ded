"""Brings the worker groups to the layout of the step that comes next.

The change is made between an update and the sync of the new weights: the replicas sleep, and a checkpoint of the step
before is written.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl_fuse.host.record.step import TrainerPart


class Layouts(TrainerPart):
    """`wanted(step)` is the `fsdp_size` of each model, from that step on; `groups` are verl's worker groups by
    model."""

    def __init__(self, groups: Mapping[str, Any], wanted: Callable[[int], Mapping[str, int]]) -> None:
        self._groups, self._wanted = groups, wanted
        self._sizes: dict[str, int] = {}
        self.metrics: dict[str, float] = {}

    def with_weight_sync(self, step: int) -> None:
        """Change each model that has another layout in the step after `step`."""
        seconds, received = 0.0, 0
        for model, size in self._wanted(step + 1).items():
            # The first call asks the workers, since a checkpoint may have brought them to another layout.
            if self._sizes.get(model) != size:
                ranks = self._groups[model].change_layout(size, step + 1)
                self._sizes[model] = size
                seconds += max(rank.seconds for rank in ranks)
                received += sum(rank.received_bytes for rank in ranks)
        self.metrics = {"fuse/realloc_seconds": seconds, "fuse/realloc_bytes": float(received)}
