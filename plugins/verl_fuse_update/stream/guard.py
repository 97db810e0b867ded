"""Tells whether gradients of streamed groups belong to the batch that the step trains on.

Invariants (tests/integration/test_stream_driver.py):
- a group that is not whole in the batch, or has other samples there, is named;
- a sample is named if its advantages or its mask differ from the values that its gradient was computed with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_fuse.host.upstream.advantages import ADVANTAGE_FIELDS
from verl_fuse.spec.trajectory import TrajectoryKey

# The tolerance is a share of a row's largest advantage: verl adds up a group's rewards in the order of the batch, which
# changes, so that a mean may differ in its last bits.
ROUNDING = 1e-5


@dataclass(frozen=True)
class StreamedRow:
    """The values with which the gradient of a row was computed: `advantages` and `mask`, one value per response
    token."""

    advantages: torch.Tensor
    mask: torch.Tensor


def streamed_rows(keys: Sequence[str], data: Any) -> dict[str, StreamedRow]:
    """Return the rows by key; `data` has ADVANTAGE_FIELDS of these rows, nested."""
    columns = [data[name].unbind() for name in ADVANTAGE_FIELDS]
    return {key: StreamedRow(one.clone(), mask.clone()) for key, one, mask in zip(keys, *columns, strict=True)}


def difference(streamed: Mapping[str, StreamedRow], batch: Mapping[str, StreamedRow]) -> str | None:
    """Return the first difference in words, or None; both by key, `batch` without rows of padding."""
    groups = {TrajectoryKey.parse(key).uid for key in streamed}
    there = {key for key in batch if TrajectoryKey.parse(key).uid in groups}
    if gone := sorted(streamed.keys() - there):
        return f"{len(gone)} streamed samples are not in the batch, first {gone[0]}"
    if added := sorted(there - streamed.keys()):
        return f"{len(added)} samples of streamed groups were added, first {added[0]}"
    for key, row in streamed.items():
        found = batch[key]
        if row.mask.shape != found.mask.shape or not torch.equal(row.mask != 0, found.mask != 0):
            return f"sample {key} has other tokens that count"
        if not _same(row.advantages, found.advantages):
            first, now = (_largest(one.advantages) for one in (row, found))
            return f"the advantage of sample {key} was {first:g} and is {now:g}"
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    allowed = ROUNDING * max(abs(_largest(one)), abs(_largest(other)))
    return bool(((one - other).abs() <= allowed).all())


def _largest(row: torch.Tensor) -> float:
    return float(row[row.abs().argmax()]) if row.numel() else 0.0
