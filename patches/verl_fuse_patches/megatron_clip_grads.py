"""Gradients of a model on the host can be clipped."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = (
    "get_grad_norm_fp32",
    "clip_grad_by_total_norm_fp32",
)

PATCH = Patch(
    name="megatron_clip_grads",
    reason="norms are put on the device cuda, and only gradients there are clipped",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/clip_grads.py",
    distributions=("megatron-core",),
    target="megatron.core.optimizer.clip_grads:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "821a1630b42596ab"},
    remove_when="norms and checks follow the device of the gradients",
    apply=on_host(FUNCTIONS),
)
