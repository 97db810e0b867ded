"""Cuts the Megatron models of a slice, and holds their weights.

All Megatron engines of a process have one parallel state, so all copies are cut alike: by the tensor parallelism of
their models, which must be the same for all, then by the largest pipeline that divides a replica's devices and the
pipeline of every model; the rest is data parallelism. With training in tp2 pp2, a replica of 4 devices has tp2 pp2
copies, a replica of 2 devices has tp2 pp1. Another tensor parallelism is refused: in bfloat16 the sums of two halves
round otherwise than one sum (a difference of 0.017 in a log-prob was seen), while two calls of verl agree. Experts are
on every rank (expert_model_parallel_size=1).

Weights are in host memory, pinned, and on their device from the first call of a step until they are released, like the
weights of device_weights.py for FSDP2; a release copies nothing back.

Invariants (tests/integration/test_megatron_slices.py):
- a copy with the parameters of its model computes the numbers of its model, to the bit, whatever its pipeline;
- after a release every parameter is in host memory, where new weights are taken over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.device import get_device_id, get_device_name, get_torch_device

from verl_fuse.errors import FuseError
from verl_fuse.spec.layout import copied_pipeline

_TENSOR, _PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def copy_settings(trained: Sequence[Any], devices: int) -> Mapping[str, Any]:
    """Return the settings in which the engine of a copy differs from its model's engine: `trained` are the engine
    blocks of all models, `devices` the number of the slice's ranks."""
    tensor = trained[0].get(_TENSOR) or 1
    pipeline = copied_pipeline(devices, tensor, (block.get(_PIPELINE) or 1 for block in trained))
    return {
        _PIPELINE: pipeline,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "forward_only": True,
        # MegatronWeights moves the weights once a step; verl would move them for each call, there and back.
        "param_offload": False,
        "optimizer_offload": False,
    }


class MegatronWeights:
    """The weights of one model: `engine` is verl's, `name` is the model's name in an error."""

    def __init__(self, engine: Any, name: str) -> None:
        self._name = name
        self._parameters = [parameter for chunk in engine.module for parameter in chunk.parameters()]
        on_host = get_device_name() == "cpu"
        self._in_host = [p.data if on_host else p.data.cpu().pin_memory() for p in self._parameters]
        self._loaded = False
        self.release()

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part of the model."""
        return sum(tensor.nbytes for tensor in self._in_host)

    def load(self) -> None:
        """Copy the weights to the device, unless they are there already; a FuseError where there is no room."""
        if self._loaded:
            return
        self._require_room()
        for parameter, tensor in zip(self._parameters, self._in_host, strict=True):
            parameter.data = tensor.to(get_device_id(), non_blocking=True)
        get_torch_device().synchronize()
        self._loaded = True

    def release(self) -> None:
        """Release the copies on the device."""
        for parameter, tensor in zip(self._parameters, self._in_host, strict=True):
            parameter.data = tensor
        self._loaded = False

    def _require_room(self) -> None:
        if get_device_name() == "cpu":
            return
        free = get_torch_device().mem_get_info()[0]
        if self.nbytes > free:
            raise FuseError(
                f"slice: weights of {self._name} need {self.nbytes} bytes of the device, of which {free} are free; "
                "needs fuse.interstage.layout=shared, or param_offload=true and optimizer_offload=true of actor and "
                "critic, which free more"
            )
