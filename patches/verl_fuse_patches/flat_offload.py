"""Lets FSDP1's CPU offload work without pinned memory, which only an accelerator provides.

verl gives every forward-only engine (the reference) `CPUOffload(offload_params=True)`. FSDP1 pins the shards when the
module is first used, and the memory for their gradients. Both stay in ordinary memory here: the handle is initialised
as one that offloads nothing, whose shards torch leaves where they are, and then offloads again.
"""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def unpinned(original: Callable[..., Any], handle: Any) -> None:
    offloads, handle._offload_params = handle._offload_params, False
    original(handle)
    handle._offload_params = offloads
    if offloads:
        flat = handle.flat_param
        flat._cpu_grad = flat._local_shard.new_zeros(flat._local_shard.shape)


PATCH = Patch(
    name="flat_offload",
    reason="FSDP1 pins the memory of an offloaded model (the reference), which raises without an accelerator",
    upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_flat_param.py",
    target="torch.distributed.fsdp._flat_param:FlatParamHandle.init_flat_param_attributes",
    fingerprints={">=2.11,<2.14": "96d0f7e6b27abb62"},
    remove_when="torch pins offloaded parameters only where there is an accelerator",
    apply=around({"FlatParamHandle.init_flat_param_attributes": unpinned}),
)
