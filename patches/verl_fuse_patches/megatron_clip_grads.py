"""Gradients of a model on the host can be clipped."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_clip_grads",
    "megatron.core.optimizer.clip_grads:get_grad_norm_fp32,clip_grad_by_total_norm_fp32",
    "821a1630b42596ab",
    reason="norms are put on the device cuda, and only gradients there are clipped",
    remove_when="norms and checks follow the device of the gradients",
)
