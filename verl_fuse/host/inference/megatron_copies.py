"""The Megatron models of a slice: how they are cut, and where their weights are.

All Megatron engines of a process have one parallel state, so all copies are cut alike: by the tensor parallelism of
their models, which must be one, then by the largest pipeline that divides a replica's devices and that of every model;
what is left is data parallelism. Trained tp2 pp2, a replica of 4 devices has such copies, one of 2 has tp2 pp1. Another
tensor parallelism is refused: in bfloat16 sums of two halves round otherwise than one sum (0.017 of a log-prob was
seen), where two of verl's own calls agree. Experts are on every rank (expert_model_parallel_size=1).

Weights are in host memory, pinned, and on their device from the first call of a step until they are released, as
device_weights.py has it for FSDP2; releasing them copies nothing back.

Invariants (tests/integration/test_megatron_slices.py):
- with the parameters of its model a copy computes the numbers of its model, to the bit, whatever its pipeline;
- released, every parameter is in host memory, where new weights are taken over.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.device import get_device_id, get_device_name, get_torch_device

from verl_fuse.errors import FuseError

_TENSOR, _PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def copy_settings(trained: Sequence[Any], devices: int) -> Mapping[str, Any]:
    """Settings in which the engine of a copy differs from that of its model: `trained` are the engines' blocks, of all
    models, `devices` the slice's ranks."""
    tensor = trained[0].get(_TENSOR) or 1
    pipeline = math.gcd(devices // tensor, *(block.get(_PIPELINE) or 1 for block in trained))
    return {
        _PIPELINE: pipeline,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "forward_only": True,
        # MegatronWeights moves them once a step; verl would for each call, there and back.
        "param_offload": False,
        "optimizer_offload": False,
    }


class MegatronWeights:
    """The weights of one model: `engine` is verl's, `name` is what an error calls it."""

    def __init__(self, engine: Any, name: str) -> None:
        self._name = name
        self._parameters = [parameter for chunk in engine.module for parameter in chunk.parameters()]
        on_host = get_device_name() == "cpu"
        self._in_host = [p.data if on_host else p.data.cpu().pin_memory() for p in self._parameters]
        self._loaded = False
        self.release()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part of the model."""
        return sum(tensor.nbytes for tensor in self._in_host)

    def load(self) -> None:
        """Copy the weights to the device, unless they are there; a FuseError where they have no room."""
        if self._loaded:
            return
        self._require_room()
        for parameter, tensor in zip(self._parameters, self._in_host, strict=True):
            parameter.data = tensor.to(get_device_id(), non_blocking=True)
        get_torch_device().synchronize()
        self._loaded = True

    def release(self) -> None:
        """Let go of what is on the device."""
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
