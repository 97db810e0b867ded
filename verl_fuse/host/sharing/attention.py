"""Attention of rows whose prompt is computed once: each branch sees its prompt's keys, then its own.

A model calls it by its name in transformers' registry, and hands the plan on as an argument: activation checkpoints
call a layer again after the forward pass, with the same arguments. No mask is made for a name that transformers does
not know.

Invariants (tests/integration/test_shared_prompts.py):
- a call without a plan raises an error: nothing else says where rows begin;
- gradients of a prompt's keys and values are summed over its branches in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.flash_attention import get_target_dtype
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_fuse.errors import FuseError
from verl_fuse.host.sharing.plan import SharedPlan

NAME = "verl_fuse_shared_prompts"
# How the names of flash attention's versions begin.
FLASH = "flash_attention"


class _Gathered(torch.autograd.Function):
    """Takes keys or values of tokens, [1, heads, tokens, size], at the places of an index; some are there several
    times."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = tensor.shape[2]
        return tensor.index_select(2, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), (index,) = gradients, ctx.saved_tensors
        shape = (*gradient.shape[:2], ctx.tokens, gradient.shape[3])
        whole = gradient.new_zeros(shape, dtype=torch.float32).index_add_(2, index, gradient.float())
        return whole.to(gradient.dtype), None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shared_prompts: SharedPlan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the outputs of all queries, [1, tokens, heads, size]; arguments are those of transformers' attention
    functions, `query` is [1, heads, tokens, size]."""
    if (plan := shared_prompts) is None:
        raise FuseError(
            "fuse.update.share_prompts=true: the model was called without a plan of its rows; false ends it"
        )
    plan.used += 1
    keys, values = _Gathered.apply(key, plan.keys), _Gathered.apply(value, plan.keys)
    if plan.kernel.startswith(FLASH):
        out = _flash_attention_forward(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            None,
            query_length=query.shape[2],
            is_causal=True,
            softmax_scale=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            cu_seq_lens_q=plan.query_starts,  # pyright: ignore[reportArgumentType]  any whole numbers
            cu_seq_lens_k=plan.key_starts,  # pyright: ignore[reportArgumentType]
            max_length_q=plan.most_queries,
            max_length_k=plan.most_keys,
            target_dtype=get_target_dtype(query, module),
            attn_implementation=plan.kernel,
        )
        return out, None
    parts, done = [], 0
    for first, end, prompt, prompt_end in plan.segments:
        before = prompt_end - prompt
        seen = slice(done, done + before + end - first)
        done = seen.stop
        mask = _mask(end - first, before, sliding_window, query.device)
        part = F.scaled_dot_product_attention(
            query[:, :, first:end],
            keys[:, :, seen],
            values[:, :, seen],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(part)
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _mask(queries: int, before: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which of `before` + `queries` keys each of the last ones sees; None: those up to itself, of as many."""
    narrow = window is not None and window < before + queries
    if not before and not narrow:
        return None
    seen = torch.ones(queries, before + queries, dtype=torch.bool, device=device).tril(before)
    return seen.triu(before - window + 1) if narrow and window is not None else seen


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
