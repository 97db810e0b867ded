"""Tells the dtype in which an FSDP engine computes; a forward-only copy of its model keeps and receives this dtype.

FSDP rounds parameters to `mixed_precision.param_dtype` before each forward pass. Rounding them once gives the same
numbers and halves memory and messages where the trained parameters are float32 and the engine computes in bfloat16.

Invariants (tests/integration/test_slice_models.py):
- only parameters that are wider are rounded: buffers (rotary frequencies) stay as they are.
"""

from typing import Any

import torch
from torch import nn
from verl.utils.torch_dtypes import PrecisionType

# verl's own default, where the configuration names no dtype (`FSDPEngine._build_fsdp_module`).
_DEFAULT = "bf16"
# By the names that a rollout's `dtype` has for them.
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def computed_dtype(engine_config: Any) -> torch.dtype:
    """Return the dtype to which an FSDP engine with this configuration (verl's FSDPEngineConfig) rounds its
    parameters."""
    return PrecisionType.to_dtype((engine_config.mixed_precision or {}).get("param_dtype", _DEFAULT))


def rounded(tensor: torch.Tensor, computed: torch.dtype) -> torch.Tensor:
    """Return the tensor in `computed`, or as it is where it is as narrow already or holds no floating-point numbers."""
    return tensor.to(computed) if tensor.is_floating_point() and computed.itemsize < tensor.itemsize else tensor


def round_parameters(module: nn.Module, computed: torch.dtype) -> nn.Module:
    """Round the parameters of `module` in place."""
    for parameter in module.parameters():
        parameter.data = rounded(parameter.data, computed)
    return module
