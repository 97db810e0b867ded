"""Lets vLLM on a CPU sample drafted positions with the request's own temperature, top-k and top-p.

With speculation these parameters are expanded from one per request to one per drafted token. The CPU's kernel writes to
an int64 copy of its output: a temperature of 0.7 would become 0, and the copy is dropped besides, so the output keeps
its left-over memory. Drafted positions are then sampled from another distribution than the model's. Accelerators have a
right kernel of their own.
"""

from types import ModuleType
from typing import Any

from verl_fuse_patches.registry import Patch


def expand(
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write `input_val` (one per request) to `output` (one per drafted token), with `replace_to` in place of
    `replace_from`; `cu_num_tokens` are the drafted tokens of the requests, summed up."""
    import torch

    drafted = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, drafted))


def apply(module: ModuleType) -> None:
    # The model runner, when made, takes the kernel from the module: since vLLM 0.31 the function, before it a wrapper.
    module._expand_kernel_impl = expand  # type: ignore[attr-defined]
    if hasattr(module, "expand_kernel"):
        module.expand_kernel = module._FuncWrapper(expand)  # type: ignore[attr-defined]


PATCH = Patch(
    name="vllm_cpu_expand",
    reason="temperature, top-k and top-p of drafted positions are written to an int64 copy that is dropped, so "
    "speculation changes the distribution",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/utils/cpu_triton_utils.py",
    target="vllm.utils.cpu_triton_utils:_expand_kernel_impl",
    fingerprints={">=0.24,<0.32": "e8cb78d1347f6ae2"},
    remove_when="vLLM's CPU kernel writes the output it is given, in that output's type",
    apply=apply,
)
