"""Releases the parameters that FSDP has gathered.

A forward pass without a backward pass leaves some of them gathered: the root's, and with `reshard_after_forward=false`
all. The next forward pass would compute with these, whatever an optimizer has done to the shards in between.

Invariants (tests/integration/test_lean_engines.py, tests/unit/host/test_device_weights.py):
- afterwards a module's parameters are its shards, whose gradients are untouched, and the next pass gathers anew.
"""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles
from verl.utils.fsdp_utils import fsdp_version


def reshard(module: Any) -> None:
    """Release what FSDP1 or FSDP2 has gathered of `module`; does nothing to a module of another engine."""
    if fsdp_version(module) == 1:
        # A handle has its shard from the first use of the module on.
        _lazy_init(module, module)
        for handle in _get_fsdp_handles(module):
            # One rank (NO_SHARD) gathers nothing.
            handle.reshard(handle.uses_sharded_strategy)
            handle.post_reshard()
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
