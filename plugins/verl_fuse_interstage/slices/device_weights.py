"""Holds the weights of a forward-only FSDP model on its device, from the first call of a step that needs them until
they are released.

verl offloads such a model: its shards are in host memory, pinned, and every forward pass of every micro-batch copies
them to the device. Here the shards are copied once, FSDP gathers from the copies (sharded.py), and a release copies
nothing back: no code writes the copies on the device.

Invariants (tests/integration/test_slice_models.py, tests/unit/host/test_device_weights.py):
- while weights are held, a forward pass copies no shard from host memory, and its numbers are the same;
- after a release the module has its host shards again and no gathered parameter is left on the device;
- weights that need more than half of the device's free memory stay in host memory, which is logged once.
"""

import logging
from typing import Any

import torch
from verl.utils.device import get_torch_device

from verl_fuse_interstage.slices.sharded import shards_of

logger = logging.getLogger(__name__)


class DeviceWeights:
    """The weights of one model: `engine` is verl's, `name` is the model's name in a log line. All ranks of the model
    build it together."""

    def __init__(self, engine: Any, name: str) -> None:
        self.shards = shards_of(engine.module)
        self._name = name
        self._in_host: list[torch.Tensor] | None = None
        self._said = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's shards."""
        return sum(tensor.nbytes for tensor in self.shards.tensors)

    def load(self) -> None:
        """Copy the shards to the device, unless they are there already or there is no room."""
        if self._in_host is not None or not self._has_room():
            return
        self._in_host, device = self.shards.tensors, self.shards.device
        self.shards.reshard()
        self.shards.place([tensor.to(device, non_blocking=True) for tensor in self._in_host], offloaded=False)
        # FSDP gathers on a stream of its own.
        get_torch_device().synchronize()

    def release(self) -> None:
        """Release the copies on the device."""
        self.shards.reshard()
        if self._in_host is not None:
            self.shards.place(self._in_host, offloaded=True)
            self._in_host = None

    def _has_room(self) -> bool:
        device = self.shards.device
        if device is None or device.type == "cpu" or 2 * self.nbytes <= (free := get_torch_device().mem_get_info()[0]):
            return True
        if not self._said:
            logger.warning(
                "slice: weights of %s (%d bytes) stay in host memory and are copied for each micro-batch, because %d "
                "bytes of the device are free and half of them are for activations; %s",
                self._name,
                self.nbytes,
                free,
                "param_offload=true and optimizer_offload=true of actor and critic free more",
            )
            self._said = True
        return False
