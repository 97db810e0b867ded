"""Finds the samples that have a gradient, by verl's advantages."""

from collections.abc import Sequence
from typing import Any

from transfer_queue import KVBatchMeta

from verl_fuse.host.upstream.rows import read
from verl_fuse.spec.timeline import ZERO_GRADIENT_SAMPLES, ZERO_GRADIENT_TOKENS

ADVANTAGE_FIELDS = ("advantages", "response_mask")


def has_gradient(data: Any) -> list[bool]:
    """Tell for each row whether any token that counts has an advantage other than exactly 0; `data` has
    ADVANTAGE_FIELDS, nested."""
    pairs = zip(data["advantages"].unbind(), data["response_mask"].unbind(), strict=True)
    return [bool(((advantages != 0) & (mask != 0)).any()) for advantages, mask in pairs]


def with_gradient(batch: KVBatchMeta) -> list[bool]:
    """Tell for each row of a batch with advantages whether it has a gradient."""
    return has_gradient(read(batch, ADVANTAGE_FIELDS))


def without_gradient(batch: KVBatchMeta, kept: Sequence[bool]) -> dict[str, float]:
    """Return the shares of the batch's samples, and of their tokens, that have no gradient, padding not counted; `kept`
    tells for each row whether it has a gradient."""
    rows = zip(kept, batch.tags, strict=True)
    lengths = [(one, int(tag["seq_len"])) for one, tag in rows if not tag.get("is_padding")]
    tokens = sum(length for _, length in lengths)
    return {
        ZERO_GRADIENT_SAMPLES: sum(not one for one, _ in lengths) / max(len(lengths), 1),
        ZERO_GRADIENT_TOKENS: sum(length for one, length in lengths if not one) / max(tokens, 1),
    }
