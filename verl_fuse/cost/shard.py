"""Counts the share of a model that one device of a layout computes and holds: counts of operations and elements, no
speeds.

A product of an (m x k) and a (k x n) matrix is 2mkn operations. Attention is causal: half of the
score matrix is computed.
"""

from verl_fuse.cost.model import Numbers
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model

# Precision of weights, activations and KV cache.
BYTES = 2


def block_flops(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Forward operations of the matrix products of one block."""
    return 2 * tokens * model.active_block_parameters / (layout.tp * layout.cp)


def attention_flops(model: Model, layout: Layout, squares: Numbers) -> Numbers:
    """Forward operations of scores and values of one block; `squares` is the sum of squared lengths."""
    return 2 * squares * model.heads * model.head_dim / (layout.tp * layout.cp)


def block_weight_bytes(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Return the bytes of one block's weights that `tokens` tokens touch; of a MoE block, the experts that get at least
    one token."""
    if not model.experts:
        return BYTES * model.block_parameters / layout.tp
    touched = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** tokens)
    rest = model.block_parameters - model.experts * model.expert_parameters
    return BYTES * (rest / layout.tp + touched * model.expert_parameters / (layout.ep * layout.expert_tp))


def elementwise_bytes(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Return the memory traffic of one block's forward outside matrix products: two norms, two residuals, rotation of q
    and k, the gated activation; each token copied to its experts and back (read and written, and read and written by
    the products of the experts, which are too narrow to hide it)."""
    active = max(1, model.experts_per_token) * model.intermediate + model.shared_intermediate
    split = 4 * (model.heads + model.kv_heads) * model.head_dim + 3 * active
    copied = 8 * model.experts_per_token * model.hidden * layout.expert_tp
    return BYTES * tokens * (10 * model.hidden + (split + copied) / layout.tp) / layout.cp


def head_flops(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Forward operations of the output layer."""
    return 2 * tokens * model.hidden * model.head_width / (layout.tp * layout.cp)


def logits_bytes(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Return the memory traffic of turning logits into log-probs: written in half, read, and gone over three times in
    full precision."""
    return (2 * BYTES + 3 * 4) * tokens * model.head_width / (layout.tp * layout.cp)


def entropy_bytes(model: Model, layout: Layout, tokens: Numbers) -> Numbers:
    """Return the memory traffic of the entropy of every token: logits gone over five times in full precision (measured
    on an H100 with 151,936 words: 20 to 23 bytes a logit)."""
    return 5 * 4 * tokens * model.head_width / (layout.tp * layout.cp)


def block_parameters(model: Model, layout: Layout) -> float:
    """Return the elements of one block on one device."""
    experts = max(1, model.experts) * model.expert_parameters
    return (model.block_parameters - experts) / layout.tp + expert_block_parameters(model, layout)


def expert_block_parameters(model: Model, layout: Layout) -> float:
    """Return the elements of one block's experts, or of its MLP, on one device."""
    return max(1, model.experts) * model.expert_parameters / (layout.ep * layout.expert_tp)


def kv_bytes_per_token(model: Model, layout: Layout) -> float:
    """Return the bytes of one block's KV cache per token on one device; fewer KV heads than tensor ranks are
    replicated."""
    return BYTES * 2 * model.head_dim * max(1.0, model.kv_heads / layout.tp) / layout.cp
