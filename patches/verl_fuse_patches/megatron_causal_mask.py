"""The causal mask of Megatron's own attention lies on the device that training runs on."""

from verl_fuse_patches.constants import on_host
from verl_fuse_patches.registry import Patch

FUNCTIONS = ("get_default_causal_mask",)

PATCH = Patch(
    name="megatron_causal_mask",
    reason="the mask is put on the device cuda",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/utils.py",
    distributions=("megatron-core",),
    target="megatron.core.transformer.utils:" + ",".join(FUNCTIONS),
    fingerprints={"==0.16.1": "c7e69b1c67056412"},
    remove_when="the mask takes the device of the scores",
    apply=on_host(FUNCTIONS),
)
