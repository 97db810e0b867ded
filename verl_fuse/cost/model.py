"""Defines what a cost model is asked about and what it answers. Everything is in seconds, bytes and tokens.

Invariants (tests/unit/cost/test_cost_model.py):
- `Batch.of(lengths).split(n)` keeps the totals: n parts of it sum to the whole;
- `Memory.total == static + active`, and every part is >= 0.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout

Placement = tuple[Mesh, Layout]
# One number, or an array of them: decode steps are costed for many replicas at once.
Numbers = Any


@dataclass(frozen=True, slots=True)
class Batch:
    """The totals over sequences: their number, their tokens, and the sum of squared lengths (the cost of attention);
    the tokens that have logits, where they are not all."""

    sequences: float
    tokens: float
    squares: float
    logits: float | None = None

    @property
    def head_tokens(self) -> float:
        """Return the number of tokens that have logits."""
        return self.tokens if self.logits is None else self.logits

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Batch":
        """Make a batch from the lengths of the sequences."""
        array = np.asarray(lengths, dtype=np.float64)
        return cls(float(array.size), float(array.sum()), float(np.dot(array, array)))

    @classmethod
    def equal(cls, sequences: float, length: float) -> "Batch":
        """Make a batch of sequences of one length."""
        return cls(float(sequences), float(sequences * length), float(sequences * length * length))

    @classmethod
    def padded(cls, lengths: np.ndarray, size: int) -> "Batch":
        """Make the batch as computed without sequence packing: every `size` sequences in turn, each as long as the
        longest of them."""
        array = np.asarray(lengths, dtype=np.float64)
        longest = [array[start : start + size].max() for start in range(0, array.size, size)]
        return cls.of(np.repeat(longest, size)[: array.size])

    def masked(self, parts: float) -> "Batch":
        """Return the batch as computed in so many equal parts, in each of which all tokens attend to each other and a
        mask leaves out those of other sequences."""
        return replace(self, squares=self.tokens**2 / parts)

    def split(self, parts: int) -> "Batch":
        """Return one of `parts` equal parts."""
        logits = None if self.logits is None else self.logits / parts
        return Batch(self.sequences / parts, self.tokens / parts, self.squares / parts, logits)


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that a call takes on the fullest device. `weights`, `gradients` and `optimizer` stay between calls
    unless `offloaded`, the rest is there only while the call runs."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv: float = 0.0
    buffers: float = 0.0
    offloaded: bool = False

    @property
    def model(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def static(self) -> float:
        """Return the bytes that stay between calls."""
        return 0.0 if self.offloaded else self.model

    @property
    def active(self) -> float:
        """Return the bytes that are added while the call runs."""
        return self.activations + self.kv + self.buffers + (self.model if self.offloaded else 0.0)

    @property
    def total(self) -> float:
        return self.static + self.active
