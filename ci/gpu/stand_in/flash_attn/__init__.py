"""Stands in for flash-attn 2, which has no wheels, on the flash kernels that torch brings along.

It answers the calls of verl and transformers for training: causal or full attention over packed or padded rows. What it
does not compute (dropout, windows, soft caps, ALiBi, cached keys, attention's weights) it refuses; nothing is left out
in silence. Invariants: tests/unit/gpu/test_stand_in.py; on a device `python -m ci.gpu.attention` compares it with
torch's plain attention.
"""

import torch

__version__ = "2.8.3"


class _Packed(torch.autograd.Function):
    """Attention of packed rows; a row is the queries and keys between two of their offsets."""

    @staticmethod
    def forward(ctx, query, key, value, offsets, key_offsets, longest, longest_key, scale, causal):
        out, log_sums, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, key_offsets, longest, longest_key, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, log_sums, offsets, key_offsets, *state)
        ctx.given = longest, longest_key, 0.0, causal
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        *tensors, seed, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), *tensors, *ctx.given, seed, unused, scale=ctx.scale
        )
        return (*found, *[None] * 6)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Return the attention of packed rows, (tokens, heads, width); key and value may have fewer heads."""
    asked = {
        "dropout_p": bool(dropout_p),
        "window_size": any(side >= 0 for side in window_size),
        "softcap": bool(softcap),
        "alibi_slopes": alibi_slopes is not None,
        "deterministic": deterministic,
        "return_attn_probs": return_attn_probs,
        "block_table": block_table is not None,
    }
    if refused := [name for name, wanted in asked.items() if wanted]:
        raise NotImplementedError(f"flash-attn's stand-in computes without {', '.join(refused)}")
    offsets, key_offsets = cu_seqlens_q.int(), cu_seqlens_k.int()
    longest, longest_key = int(max_seqlen_q), int(max_seqlen_k)
    return _Packed.apply(q, k, v, offsets, key_offsets, longest, longest_key, softmax_scale, causal)


def flash_attn_func(q, k, v, *arguments, **named):
    """Return the attention of rows of one length, (rows, tokens, heads, width)."""
    offsets, key_offsets = (
        torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
        for rows, length in (q.shape[:2], k.shape[:2])
    )
    query, key, value = (each.flatten(0, 1) for each in (q, k, v))
    longest, longest_key = q.shape[1], k.shape[1]
    packed = flash_attn_varlen_func(query, key, value, offsets, key_offsets, longest, longest_key, *arguments, **named)
    return packed.view(q.shape)


def flash_attn_with_kvcache(*arguments, **named):
    raise NotImplementedError("flash-attn's stand-in computes without cached keys")
