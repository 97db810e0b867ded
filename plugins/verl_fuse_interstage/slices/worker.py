"""The worker of a slice: forward-only copies of all models a finished sample goes through, on the devices of one
rollout replica.

The copies of actor and critic take new weights once per step. One call computes every model for a micro-group and
returns the fields under their final names. Weights are on the device from the first call of a step until its memory is
released (device_weights.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import get_torch_device
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.tensordict_utils import get as get_value
from verl.workers.engine_workers import TrainingWorker

from verl_fuse.host.record.spans import remote_recorder
from verl_fuse.host.upstream.engines import is_megatron
from verl_fuse.host.weights.buckets import load_parameters
from verl_fuse.host.weights.exports import Export
from verl_fuse.spec.step import Stage
from verl_fuse_interstage.slices.device_weights import DeviceWeights
from verl_fuse_interstage.slices.megatron_copies import MegatronWeights
from verl_fuse_interstage.slices.models import build_models, compute

# The RPC mesh of a slice: a batch is cut over its data-parallel ranks, of which all its models have equally many.
MESH = "slice"


class SliceWorker(Worker):
    """`stages`: what to compute; `config`, `critic` and `engines` configure the models (`build_models`); `number` is
    the rank of the slice's replica."""

    def __init__(
        self, config: Any, stages: Sequence[Stage], critic: Any, number: int, engines: Mapping[str, bool], **kwargs: Any
    ):
        super().__init__(**kwargs)
        self._config, self._critic, self._engines = config, critic, engines
        self._stages, self._number = tuple(stages), number
        self._models: dict[Stage, TrainingWorker] = {}
        self._device_weights: dict[Stage, DeviceWeights | MegatronWeights] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def init_model(self) -> None:
        """Build the models of the stages; a collective of the slice's ranks."""
        self._models = build_models(self._stages, self._config, self._critic, self.world_size, **self._engines)
        # One for each model, of which two stages may have the same.
        stage_of: dict[int, Stage] = {id(model): stage for stage, model in self._models.items()}
        held = {
            model: _device_weights(self._models[stage].engine, f"{stage!r} on slice {self._number}")
            for model, stage in stage_of.items()
        }
        self._device_weights = {stage: held[id(model)] for stage, model in self._models.items()}
        model = next(iter(self._models.values()))
        self.set_dispatch_collect(mesh_name=MESH, **model.get_dispatch_collect())
        # Each model was whole on the device while it was built.
        aggressive_empty_cache(force_sync=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def release_memory(self) -> None:
        """Give back the device's memory, weights included: the rollout engine and the trainer on the same device need
        it."""
        for weights in self._device_weights.values():
            weights.release()
        # Without verl's collection of garbage, which goes through all objects of a process: a forward pass leaves no
        # tensor in a circle of references.
        device = get_torch_device()
        device.synchronize()
        device.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def load_weights(self, weights: Mapping[Stage, Export]) -> None:
        """Take over the parameters that the training ranks left in Ray's object store, per stage."""
        with remote_recorder().span("load_weights", f"slice {self._number}", "sync"):
            for stage, export in weights.items():
                self._device_weights[stage].release()
                load_parameters(self._models[stage].engine, map(ray.get, export.buckets), export.frozen)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def infer(self, data: TensorDict) -> TensorDict | None:
        """Return the fields of the stages that `data` names, for its rows, one value per response token; None on ranks
        that hold no output."""
        temperature = get_value(data, "temperature")
        asked = set(get_value(data, "stages").split())
        given = data.select(*(key for key in data.keys() if key not in ("temperature", "stages")))  # noqa: SIM118
        fields: dict[str, Any] = {}
        recorder = remote_recorder()
        for stage in filter(asked.__contains__, self._stages):
            with recorder.span(stage, f"slice {self._number}", "inference", samples=len(data)):
                self._device_weights[stage].load()
                found = compute(stage, self._models[stage], given, temperature)
            fields |= found or {}
        return TensorDict(fields, batch_size=len(data)).cpu() if fields else None


def _device_weights(engine: Any, name: str) -> DeviceWeights | MegatronWeights:
    return (MegatronWeights if is_megatron(engine) else DeviceWeights)(engine, name)
