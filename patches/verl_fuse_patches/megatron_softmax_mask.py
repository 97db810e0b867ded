"""Megatron's own attention is causal when verl gives the attention a mask of valid tokens.

verl pads micro-batches on the right and passes their validity (samples x tokens) as a mask. Transformer Engine's causal
attention ignores the mask; Megatron's own softmax, the only one on a CPU, would apply the mask as if it were a mask of
scores. With padding on the right, causal attention of valid tokens never looks at padding, so no mask is right.
"""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def forward(original: Callable[..., Any], self: Any, input: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, input, None if mask is not None and mask.dim() == 2 else mask, *args, **kwargs)


PATCH = Patch(
    name="megatron_softmax_mask",
    reason="a mask of valid tokens (samples x tokens) is applied to the scores",
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/fusions/fused_softmax.py",
    target="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward",
    fingerprints={"==0.16.1": "119671ef61a02bac"},
    remove_when="verl passes Megatron's own attention a mask of scores, or none",
    apply=around({"FusedScaleMaskSoftmax.forward": forward}),
)
