"""The dtype an FSDP engine computes in, which is what a forward-only copy of its model keeps and is sent.

FSDP rounds parameters to `mixed_precision.param_dtype` before each forward pass. Rounding them once gives the same
numbers and halves memory and messages where the trained parameters are float32 and bfloat16 is computed in.

Invariants (tests/integration/test_slice_models.py):
- only what is wider is rounded, and only parameters: buffers (rotary frequencies) are computed with as they are.
"""

from typing import Any

import torch
from torch import nn
from verl.utils.torch_dtypes import PrecisionType

# verl's own, where the configuration does not say (`FSDPEngine._build_fsdp_module`).
_DEFAULT = "bf16"


def computed_dtype(engine_config: Any) -> torch.dtype:
    """The dtype to which an FSDP engine with this configuration (verl's FSDPEngineConfig) rounds its parameters."""
    return PrecisionType.to_dtype((engine_config.mixed_precision or {}).get("param_dtype", _DEFAULT))


def rounded(tensor: torch.Tensor, computed: torch.dtype) -> torch.Tensor:
    """The tensor in `computed`, unless it is as narrow already or holds no floating-point numbers."""
    return tensor.to(computed) if tensor.is_floating_point() and computed.itemsize < tensor.itemsize else tensor


def round_parameters(module: nn.Module, computed: torch.dtype) -> nn.Module:
    """Round the parameters of `module` in place."""
    for parameter in module.parameters():
        parameter.data = rounded(parameter.data, computed)
    return module
