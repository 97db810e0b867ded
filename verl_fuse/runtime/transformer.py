"""Builds the parts of a decoder-only transformer as plain torch modules, one tensor rank's shard of each, for
measuring. No module is trained here."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl_fuse.errors import FuseError
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model


class Block(nn.Module):
    """Attention with grouped KV heads and rotation, and a gated MLP, each after a norm: (batch,
    length, hidden) -> the same."""

    def __init__(self, model: Model, tp: int):
        super().__init__()
        if model.experts:
            raise FuseError(
                f"model {model.name}: blocks with experts cannot be profiled; the analytic model costs them"
            )
        Layout(tp=tp).check(model)
        self.heads, self.kv_heads, self.head_dim = model.heads // tp, max(1, model.kv_heads // tp), model.head_dim
        self.attention_norm = nn.RMSNorm(model.hidden)
        self.query = nn.Linear(model.hidden, self.heads * self.head_dim, bias=False)
        self.key_value = nn.Linear(model.hidden, 2 * self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(self.heads * self.head_dim, model.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(model.hidden)
        self.gate_up = nn.Linear(model.hidden, 2 * model.intermediate // tp, bias=False)
        self.down = nn.Linear(model.intermediate // tp, model.hidden, bias=False)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        """Compute a block. `cache`: (2, batch, kv heads, context, head_dim), keys and values of tokens that came
        before; then x has one token each."""
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query = self.query(normed).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        key, value = self.key_value(normed).view(batch, length, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key = _rotate(query), _rotate(key)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=cache is None, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Module):
    """The output layer, which computes log-probs of given tokens, or values; in decoding, drawn tokens."""

    def __init__(self, model: Model, tp: int):
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden)
        self.width = max(1, model.head_width // tp)
        self.linear = nn.Linear(model.hidden, self.width, bias=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Map (batch, length, hidden), (batch, length) -> (batch, length): log-probs of `tokens`, or values."""
        logits = self.linear(self.norm(x)).float()
        if self.width == 1:
            return logits.squeeze(-1)
        return logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def draw(self, x: Tensor) -> Tensor:
        """Draw tokens, (batch, 1, hidden) -> (batch, 1): sampled tokens."""
        return torch.multinomial(self.linear(self.norm(x)).float().softmax(dim=-1).flatten(0, 1), 1)


def _rotate(x: Tensor) -> Tensor:
    """Return the rotary embedding of (batch, heads, length, head_dim), by half vectors."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
