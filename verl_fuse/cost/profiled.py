"""Takes measured seconds instead of the roofline's, wherever a profile has the model and its tensor parallelism.

Invariants (tests/unit/cost/test_profiled.py):
- at a measured batch and length the answer is the measurement times the blocks, plus floors and collectives;
- a model or degree that was not measured costs the seconds of the analytic model;
- a profile of a CPU is none of an accelerator, and one of an accelerator is of no other with more or less memory.
Collectives, pipelines and memory stay analytic: they need more than one device to measure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import floors_of
from verl_fuse.cost.collectives import DeviceGroup
from verl_fuse.cost.grid import MeasuredGrid
from verl_fuse.cost.model import Batch, Numbers
from verl_fuse.cost.shard import BYTES
from verl_fuse.cost.table import MeasuredModel, Part, Pass, ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Cluster, Device
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.units import GIB

# Two accelerators whose memory differs by more than this factor are different devices: drivers and vendors count it a
# little differently.
_SAME_MEMORY = 1.5
# A block's cost depends on these alone.
_BLOCK = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "experts",
    "experts_per_token",
    "shared_intermediate",
)


@dataclass(frozen=True)
class ProfiledCost(AnalyticCost):
    """The cost model of `cluster` by a profile of its device. Make it with `ProfiledCost.of`."""

    table: ProfileTable | None = None

    @classmethod
    def of(cls, table: ProfileTable, cluster: Cluster) -> "ProfiledCost":
        """Make the cost model of a profile. The floors of the software are the profile's if it has floors. A FuseError
        refuses a profile of another kind of device."""
        _check_device(table.device, cluster.device)
        return cls(cluster, table.engine or floors_of(cluster.device), table)

    def block(self, model: Model, layout: Layout, batch: Batch, *, backward: bool = False) -> float:
        grid = self._grid(model, layout, "block", "backward" if backward else "forward")
        if grid is None:
            return super().block(model, layout, batch, backward=backward)
        # The sequences of one length that have the same tokens and squares.
        length = batch.squares / batch.tokens
        seconds = grid.at(batch.tokens / length / layout.cp, length) + self._block_collectives(
            model, layout, batch.tokens
        )
        return float(self._with_gathering(seconds, model, layout, backward))

    def decode_block(self, model: Model, layout: Layout, sequences: Numbers, context: Numbers) -> Numbers:
        grid = self._grid(model, layout, "block", "decode")
        if grid is None:
            return super().decode_block(model, layout, sequences, context)
        length = np.maximum(1.0, context / np.maximum(sequences, 1e-9))
        return grid.at(sequences, length) + self._block_collectives(model, layout, sequences)

    def head(self, model: Model, layout: Layout, tokens: Numbers, *, backward: bool = False) -> Numbers:
        grid = self._grid(model, layout, "head", "backward" if backward else "forward")
        if grid is None:
            return super().head(model, layout, tokens, backward=backward)
        return _by_tokens(grid, tokens / layout.cp)

    def decode_head(self, model: Model, layout: Layout, sequences: Numbers) -> Numbers:
        grid = self._grid(model, layout, "head", "decode")
        return super().decode_head(model, layout, sequences) if grid is None else grid.at(sequences, grid.lengths[0])

    def embedding(self, model: Model, layout: Layout, tokens: Numbers) -> Numbers:
        grid = self._grid(model, layout, "embedding", "forward")
        if grid is None:
            return super().embedding(model, layout, tokens)
        size = BYTES * tokens * model.hidden / layout.cp
        return _by_tokens(grid, tokens / layout.cp) + self.network.reduce(DeviceGroup(layout.tp, 1), size)

    def optimizer(self, model: Model, layout: Layout, elements: float) -> float:
        found = self._measured(model, layout, _BLOCK)
        return super().optimizer(model, layout, elements) if found is None else elements / found.optimizer_rate

    def _grid(self, model: Model, layout: Layout, part: Part, direction: Pass) -> MeasuredGrid | None:
        fields = _BLOCK if part == "block" else ("hidden", "vocabulary", *(("value_head",) if part == "head" else ()))
        found = self._measured(model, layout, fields)
        return None if found is None else _grid_of(found, part, direction)

    def _measured(self, model: Model, layout: Layout, fields: tuple[str, ...]) -> MeasuredModel | None:
        for found in self.table.models if self.table else ():
            if found.tp == layout.tp and all(getattr(found.model, name) == getattr(model, name) for name in fields):
                return found
        return None


def cost_model(cluster: Cluster, profile: Path | None = None, floors: Mapping[str, Any] | None = None) -> AnalyticCost:
    """Return the cost model of steps on a cluster: measured where there is a `profile` that has numbers, analytic
    otherwise; `floors` take the place of its floors."""
    if profile is None:
        cost = AnalyticCost(cluster, floors_of(cluster.device))
    else:
        cost = ProfiledCost.of(ProfileTable.read(profile), cluster)
    return replace(cost, engine=cost.engine.changed(floors or {}))


def _check_device(measured: Device, planned: Device) -> None:
    """Raise a FuseError where the profile's device is of another kind than the cluster's. Names do not tell the kind:
    CUDA's names are longer than the built-in names."""
    less, more = sorted((measured.memory, planned.memory))
    if measured.is_cpu == planned.is_cpu and (measured.is_cpu or more <= _SAME_MEMORY * less):
        return
    of, on = (f"{device.name} ({device.memory / GIB:.1f} GiB)" for device in (measured, planned))
    raise FuseError(
        f"profile of the device {of}: the cluster's devices are {on}; measure one of those with `verl-fuse profile`, "
        "name a cluster of the profile's device, or leave the profile out"
    )


@lru_cache(maxsize=1024)
def _grid_of(found: MeasuredModel, part: Part, direction: Pass) -> MeasuredGrid:
    return next(m.grid for m in found.measurements if (m.part, m.direction) == (part, direction))


def _by_tokens(grid: MeasuredGrid, tokens: Numbers) -> Numbers:
    """Return the seconds of a part that does not depend on sequences: tokens come as sequences of the middle length."""
    length = grid.lengths[len(grid.lengths) // 2]
    return grid.at(np.maximum(tokens / length, 1e-9), np.minimum(length, np.maximum(tokens, 1e-9)))
