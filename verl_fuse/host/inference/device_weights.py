"""Weights of a forward-only FSDP2 model on its device, from the first call of a step that needs them until they are released.

verl gives such a model FSDP2's offload policy: its shards are in host memory, pinned, and every forward pass of every micro-batch copies them to the
device. Here the shards are copied once, FSDP2 gathers from the copies, and releasing them copies nothing back: nobody writes them on the device.

Invariants (tests/integration/test_slice_models.py, tests/unit/host/test_device_weights.py):
- while weights are held, a forward pass copies no shard from host memory, and its numbers are the same;
- released, the module has its host shards again and no gathered parameter is left on the device;
- weights that need more than half of the device's free memory stay in host memory, which is said once.

FSDP1 keeps no shard apart from its flat parameter, and copies it for each micro-batch as before.
"""

import logging
from typing import Any

import torch
from torch import nn
from verl.utils.device import get_torch_device

from verl_fuse.host.weights.layouts.unwrap import state_of, wrapped

logger = logging.getLogger(__name__)


class DeviceWeights:
    """Of one model: `engine` is verl's, `name` is what a log line calls it. Built by all ranks of the model together."""

    def __init__(self, engine: Any, name: str) -> None:
        module: nn.Module = engine.module
        self._name = name
        self._parts = wrapped(module)
        groups = [group for part in self._parts if (group := state_of(part)._fsdp_param_group) is not None]
        self._shards: list[Any] = [shard for group in groups for shard in group.fsdp_params]
        self._in_host: list[torch.Tensor] | None = None
        self._said = False
        for part in self._parts:
            # The first time a module is gathered, FSDP2 looks its shards up anew: it would put those in host memory in the place of ours.
            part.unshard()
            part.reshard()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(shard._sharded_param_data.nbytes for shard in self._shards)

    def load(self) -> None:
        """Copy the shards to the device, unless they are there or have no room."""
        if self._in_host is not None or not self._has_room():
            return
        self._in_host = [shard._sharded_param_data for shard in self._shards]
        for shard in self._shards:
            shard._sharded_param_data = shard._sharded_param_data.to(shard.device, non_blocking=True)
        # FSDP2 gathers on a stream of its own.
        get_torch_device().synchronize()

    def release(self) -> None:
        """Let go of what is on the device."""
        for part in self._parts:
            # The root stays gathered after a forward pass, and so does everything with reshard_after_forward=false.
            part.reshard()
        if self._in_host is not None:
            for shard, data in zip(self._shards, self._in_host, strict=True):
                shard._sharded_param_data = data
            self._in_host = None

    def _has_room(self) -> bool:
        free = _free_bytes(self._shards)
        if free is None or 2 * self.nbytes <= free:
            return True
        if not self._said:
            logger.warning(
                "slice: weights of %s (%d bytes) stay in host memory and are copied for each micro-batch, because %d bytes of the device are free and half of "
                "them are for activations; %s",
                self._name,
                self.nbytes,
                free,
                "param_offload=true and optimizer_offload=true of actor and critic free more",
            )
            self._said = True
        return False


def _free_bytes(shards: list[Any]) -> int | None:
    """Of the device of these shards; None where that is the host."""
    if not shards or shards[0].device.type == "cpu":
        return None
    return get_torch_device().mem_get_info()[0]
