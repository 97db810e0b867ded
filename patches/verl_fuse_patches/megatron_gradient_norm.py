"""Megatron's own norm of gradients lies on the device that training runs on."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = ("local_multi_tensor_l2_norm",)

PATCH = Patch(
    name="megatron_gradient_norm",
    reason="the norm is put on the device cuda",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/utils.py",
    distributions=("megatron-core",),
    target="megatron.core.utils:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "f8d4e3a9ebe34604"},
    remove_when="the norm takes the device of the gradients",
    apply=on_host(FUNCTIONS),
)
