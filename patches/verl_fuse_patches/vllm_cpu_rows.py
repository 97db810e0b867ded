"""vLLM on a CPU multiplies few different numbers of rows.

oneDNN prepares a multiplication for each number of rows before the first use: about 1.3 ms for each shape of weight,
longer than the multiplications of a small model take. A layer keeps 32 prepared numbers, and a weight sync begins anew.
A pass with drafts has another number of tokens than nearly every pass before. The patch rounds the number up, by at
most an eighth or three rows, and drops the added rows of the result. The caller looks the function up at each call.
"""

import functools
from types import ModuleType
from typing import Any

from verl_fuse_patches.registry import Patch

LEAST_STEP = 4


def rounded(rows: int) -> int:
    """Return the number of rows that is multiplied in place of `rows`: from one power of two to the next there are at
    most eight numbers."""
    if rows <= 1:
        return rows
    step = max(LEAST_STEP, 1 << max((rows - 1).bit_length() - 4, 0))
    return -(-rows // step) * step


def apply(module: ModuleType) -> None:
    import torch

    original = module.onednn_mm

    @functools.wraps(original)
    def onednn_mm(dnnl_handler: Any, x: Any, bias: Any) -> Any:
        if torch.compiler.is_compiling():
            # A compiled graph is of any number of rows.
            return original(dnnl_handler, x, bias)
        flat = x.reshape(-1, dnnl_handler.k)
        rows = len(flat)
        more = rounded(rows) - rows
        if not more:
            return original(dnnl_handler, x, bias)
        found = original(dnnl_handler, torch.nn.functional.pad(flat, (0, 0, 0, more)), bias)
        return found[:rows].view(*x.shape[:-1], dnnl_handler.n)

    module.onednn_mm = onednn_mm  # type: ignore[attr-defined]


PATCH = Patch(
    name="vllm_cpu_rows",
    reason="oneDNN prepares each linear layer anew for a number of tokens that it has not met lately, which takes "
    "longer than a small model's pass; with drafts nearly every pass has another number",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/_custom_ops.py",
    target="vllm._custom_ops:onednn_mm",
    fingerprints={">=0.24,<0.32": "c3c723fd4f8c273c"},
    remove_when="vLLM rounds the number of rows itself, or oneDNN prepares multiplications for any number of rows",
    apply=apply,
)
