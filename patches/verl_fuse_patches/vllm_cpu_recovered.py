"""Lets vLLM 0.24 speculate on a CPU: its kernel that samples a token in place of a rejected draft accepts the sampler's
argument.

The sampler tells whether its random numbers are float64. The CPU's kernel of 0.24 does not know that argument, so every
engine that speculates fails when it starts. The patch rounds the numbers to the float32 that the kernel reads, like
vLLM 0.28.
"""

import functools
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_fuse_patches.registry import Patch

# Kernels of later versions have the argument.
LACKING = ">=0.24,<0.25"


def apply(module: ModuleType) -> None:
    import torch

    original = module._sample_recovered_tokens_kernel_impl

    @functools.wraps(original)
    def sample_recovered(
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        draft_probs: Any,
        target_probs: Any,
        inv_q: Any,
        vocab_size: int,
        BLOCK_SIZE: int | None = None,
        NO_DRAFT_PROBS: bool = False,
        USE_FP64_GUMBEL: bool = False,
    ) -> None:
        original(
            output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, inv_q.to(torch.float32),
            vocab_size, BLOCK_SIZE, NO_DRAFT_PROBS,
        )  # fmt: skip

    # The model runner, when made, takes the kernel from the module.
    module.sample_recovered_tokens_kernel = module._FuncWrapper(sample_recovered)  # type: ignore[attr-defined]


PATCH = Patch(
    name="vllm_cpu_recovered",
    reason="the kernel for recovered tokens does not take USE_FP64_GUMBEL, with which the rejection sampler calls it",
    upstream="https://github.com/vllm-project/vllm/blob/v0.24.0/vllm/utils/cpu_triton_utils.py",
    target="vllm.utils.cpu_triton_utils:_sample_recovered_tokens_kernel_impl",
    fingerprints={LACKING: "9ca0b9ff3ee50c90"},
    remove_when="vLLM 0.24 is no longer supported",
    apply=apply,
    needed=lambda version: SpecifierSet(LACKING).contains(version, prereleases=True),
)
