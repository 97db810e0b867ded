"""Weights of Megatron's own layers have names in a checkpoint.

Transformer Engine fuses a norm into the next linear layer, Megatron's own layers keep the two apart and name the norm
differently. mbridge knows the fused names only.
"""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around

# Megatron's own name -> the name of the norm fused into the linear layer after the norm.
NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def mapped(original: Callable[..., list[str]], self: Any, mcore_weights_name: str) -> list[str]:
    for own, fused in NORMS.items():
        mcore_weights_name = mcore_weights_name.replace(own, fused)
    return original(self, mcore_weights_name)


PATCH = Patch(
    name="mbridge_norm_names",
    reason="norms of Megatron's own layers are not in the table of names",
    upstream="https://github.com/ISEEKYAN/mbridge/blob/main/mbridge/core/bridge.py",
    target="mbridge.core.bridge:Bridge._weight_name_mapping_mcore_to_hf",
    fingerprints={"==0.15.1": "8e1e8912a59dc33d"},
    remove_when="mbridge knows the names of Megatron's own layers",
    apply=around({"Bridge._weight_name_mapping_mcore_to_hf": mapped}),
)
