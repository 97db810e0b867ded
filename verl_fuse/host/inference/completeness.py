"""Checks that every row has every field, at its own length, before a stage reads the batch.

TransferQueue returns the intersection of fields: one row without `ref_log_prob` makes the field vanish for the whole
batch, silently. Padding rows are clones of the first row (padding_utils.py), so fields computed before balancing are
stale on them. Both faults show here as a missing field or a wrong length.
"""

from collections.abc import Sequence

from transfer_queue import KVBatchMeta

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.rows import read
from verl_fuse.spec.step import Stage


def require_complete(batch: KVBatchMeta, stage: Stage, fields: Sequence[str]) -> None:
    """Raise a FuseError unless all rows of `batch` hold `fields` (nested, one value per response token)."""
    data = read(batch, [*fields, "response_mask"])
    missing = [name for name in fields if name not in data.keys()]  # noqa: SIM118 - a TensorDict
    if missing:
        raise FuseError(
            f"stage {stage!r}: {', '.join(missing)} is missing from at least one of {len(batch)} rows, so "
            "TransferQueue dropped it for all; samples were lost between streaming and the barrier"
        )
    want = [int(tag["response_len"]) for tag in batch.tags]
    for name in fields:
        got = data[name].offsets().diff().tolist()
        wrong = [(key, have, need) for key, have, need in zip(batch.keys, got, want, strict=True) if have != need]
        if wrong:
            key, have, need = wrong[0]
            raise FuseError(
                f"stage {stage!r}: {name} of {len(wrong)} rows has the wrong length, first {key}: {have} values for "
                f"{need} response tokens (a padding row with stale fields, or the full-sequence form)"
            )
