"""Interpolates measured seconds over batch size and sequence length.

Invariants (tests/unit/cost/test_grid.py):
- at a measured point the answer is the measurement, and between two it lies between them;
- below the smallest measured size the answer stays the same: only overhead remains;
- beyond the largest, seconds grow in proportion.
"""

from dataclasses import dataclass

import numpy as np

from verl_fuse.cost.model import Numbers


@dataclass(frozen=True, eq=False)
class MeasuredGrid:
    """Measured seconds: `seconds[i, j]` belongs to `batches[i]` sequences of `lengths[j]` tokens; both ascend.
    Interpolation is linear in logarithms."""

    batches: np.ndarray
    lengths: np.ndarray
    seconds: np.ndarray

    def at(self, batch: Numbers, length: Numbers) -> Numbers:
        """Return the seconds; works on arrays."""
        row, across = _place(self.batches, batch)
        column, along = _place(self.lengths, length)
        logs = np.log(self.seconds)
        below, above = (
            _mix(logs[r, column], logs[r, np.minimum(column + 1, len(self.lengths) - 1)], along)
            for r in (row, np.minimum(row + 1, len(self.batches) - 1))
        )
        inside = np.exp(_mix(below, above, across))
        return inside * np.maximum(1.0, batch / self.batches[-1]) * np.maximum(1.0, length / self.lengths[-1])


def _place(axis: np.ndarray, value: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return the last grid point at or below the value, and the fraction of the way to the next point, clamped to the
    grid."""
    clamped = np.clip(value, axis[0], axis[-1])
    index = np.clip(np.searchsorted(axis, clamped, side="right") - 1, 0, max(0, len(axis) - 2))
    following = axis[np.minimum(index + 1, len(axis) - 1)]
    step = np.log(following / axis[index])
    fraction = np.log(clamped / axis[index]) / np.where(step > 0, step, 1.0)
    return index, fraction


def _mix(low: np.ndarray, high: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    return low + (high - low) * fraction
