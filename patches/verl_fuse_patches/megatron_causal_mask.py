"""The causal mask of Megatron's own attention lies on the device that training runs on."""

from verl_fuse_patches.constants import on_host

PATCH = on_host(
    "megatron_causal_mask",
    "megatron.core.transformer.utils:get_default_causal_mask",
    "c7e69b1c67056412",
    reason="the mask is put on the device cuda",
    remove_when="the mask takes the device of the scores",
)
