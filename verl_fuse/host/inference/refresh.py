"""Gives slices the weights of a step while the replicas get them.

No stage waits for weights: the lane of the training workers has nothing else to do while the next step generates, and
slices begin when replicas are released. Only an export that needs a device's memory is done while the replicas still
sleep. Slices give their devices' memory back as soon as they have computed the last sample of a step, before a model is
trained there and before the replicas wake.

The first export is of all parameters, every later export of the trained parameters: with LoRA, of adapters.
"""

from collections.abc import Callable, Mapping
from functools import partial

from verl_fuse.host.inference.lane import Lane
from verl_fuse.host.inference.slices import Slices
from verl_fuse.host.record.step import TrainerPart
from verl_fuse.host.weights.exports import Export
from verl_fuse.spec.step import Stage


class SliceRefresh(TrainerPart):
    """`export` leaves the weights of the training workers, all or the trained ones, and runs on the workers' `lane`;
    `on_devices`: the export needs memory of their devices."""

    def __init__(self, slices: Slices, lane: Lane, export: Callable[[bool], Mapping[Stage, Export]], on_devices: bool):
        self._slices, self._lane, self._export, self._on_devices = slices, lane, export, on_devices
        self._whole, self._nbytes = True, 0

    def after_inference(self, step: int) -> None:
        self._slices.release_memory()
        self.metrics = {"fuse/slice_weight_bytes": float(self._nbytes)}

    def before_weight_sync(self, step: int) -> None:
        if self._on_devices:
            self._refresh()

    def after_weight_sync(self, step: int) -> None:
        if not self._on_devices:
            self._refresh()

    def _refresh(self) -> None:
        export = partial(self._lane.recorded, "export_weights", "sync", self._exported)
        self._slices.load(self._lane.submit(export, "export_weights"))

    def _exported(self) -> Mapping[Stage, Export]:
        found = self._export(self._whole)
        self._whole, self._nbytes = False, sum(export.nbytes for export in found.values())
        return found

    def close(self) -> None:
        self._slices.close()
