"""Replaces the shards of a forward-only FSDP model: FSDP gathers from the shards in place.

Invariants (tests/unit/host/test_device_weights.py):
- FSDP gathers from shards put in place without copying a shard first;
- after resharding no gathered parameter is left on the device, nor the root's;
- with the original shards in place, the module is offloaded, like FSDP expects.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles
from verl.utils.fsdp_utils import fsdp_version

from verl_fuse.host.weights.gathered import reshard


class ParameterShards:
    """The shards of FSDP2 on this rank: one shard of each parameter."""

    def __init__(self, module: nn.Module) -> None:
        parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        # FSDP2 keeps no group of a module all of whose parameters belong to modules wrapped within it.
        states: list[Any] = [fully_shard.state(part) for part in parts]  # pyright: ignore[reportFunctionMemberAccess]
        groups = [group for state in states if (group := state._fsdp_param_group) is not None]
        self._module = module
        self.parameters: list[Any] = [shard for group in groups for shard in group.fsdp_params]
        for part in parts:
            # The first time a module is gathered, FSDP2 looks its shards up anew: it would put the shards in host
            # memory in the place of ours.
            part.unshard()
            part.reshard()

    @property
    def device(self) -> torch.device | None:
        """Return the device on which the model computes; None for a model without parameters."""
        return self.parameters[0].device if self.parameters else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the shards that are in place."""
        return [shard._sharded_param_data for shard in self.parameters]

    def place(self, tensors: Sequence[torch.Tensor], offloaded: bool) -> None:
        """Put these shards in place; `offloaded`: they are in host memory, where FSDP keeps them, else on the device.
        Only allowed while no parameter is gathered."""
        for shard, tensor in zip(self.parameters, tensors, strict=True):
            shard._sharded_param_data = tensor

    def reshard(self) -> None:
        """Release all gathered parameters."""
        reshard(self._module)


class FlatShards:
    """The shards of FSDP1, in the same form: one shard of all parameters of a wrapped module together."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.handles: list[Any] = _get_fsdp_handles(module)
        # The module is in use from here on, which pins its shards.
        self.reshard()

    @property
    def device(self) -> torch.device | None:
        return self.handles[0].device if self.handles else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [handle.flat_param._local_shard for handle in self.handles]

    def place(self, tensors: Sequence[torch.Tensor], offloaded: bool) -> None:
        for handle, tensor in zip(self.handles, tensors, strict=True):
            # FSDP1 copies shards that it takes for offloaded to the device, before each gathering.
            handle._offload_params = offloaded
            handle.flat_param._local_shard = tensor
            handle._use_sharded_flat_param()

    def reshard(self) -> None:
        reshard(self._module)


def shards_of(module: nn.Module) -> FlatShards | ParameterShards:
    """Return the shards of a module that FSDP1 or FSDP2 offloads; called by all ranks of the model together."""
    return FlatShards(module) if fsdp_version(module) == 1 else ParameterShards(module)
