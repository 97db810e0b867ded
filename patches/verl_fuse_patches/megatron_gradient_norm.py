"""Megatron's own norm of gradients lies on the device that training runs on."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_gradient_norm",
    "megatron.core.utils:local_multi_tensor_l2_norm",
    "f8d4e3a9ebe34604",
    reason="the norm is put on the device cuda",
    remove_when="the norm takes the device of the gradients",
)
