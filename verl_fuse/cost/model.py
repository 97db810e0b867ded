"""Defines the questions that a cost model answers. Everything is in seconds, bytes and tokens.

Invariants (tests/unit/cost/test_cost_model.py):
- `Batch.of(lengths).split(n)` keeps the totals: n parts of it sum to the whole;
- `Memory.total == static + active`, and every part is >= 0.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.workload import CallKind

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


class CostModel(Protocol):
    """A model of the seconds and bytes of model function calls on a cluster. A `batch` is a micro-batch or a whole
    call: each docstring names which."""

    @property
    def cluster(self) -> Cluster: ...

    def stage_seconds(
        self, model: Model, layout: Layout, batch: Batch, *, backward: bool = False, recompute: bool = False
    ) -> tuple[float, ...]:
        """Return the seconds of each pipeline stage for one micro-batch of one data-parallel rank; `recompute` adds the
        forward to a backward."""
        ...

    def forward(self, model: Model, layout: Layout, batch: Batch) -> float:
        """Return the seconds of the slowest stage for the forward of one micro-batch."""
        ...

    def backward(self, model: Model, layout: Layout, batch: Batch, *, recompute: bool = False) -> float:
        """Return the seconds of the slowest stage for the backward of one micro-batch."""
        ...

    def infer(
        self, model: Model, layout: Layout, mesh: Mesh, batch: Batch, microbatches: int, *, entropy: bool = False
    ) -> float:
        """Return the seconds of a forward call over the whole `batch`, in `microbatches` per data-parallel rank, and of
        the `entropy` of each token's distribution."""
        ...

    def train(
        self,
        model: Model,
        layout: Layout,
        mesh: Mesh,
        batch: Batch,
        minibatches: int,
        microbatches: int,
        *,
        recompute: bool = True,
    ) -> float:
        """Return the seconds of one pass over the whole `batch`: `minibatches` updates of `microbatches` per
        data-parallel rank each."""
        ...

    def update(self, model: Model, layout: Layout) -> float:
        """Return the seconds of one gradient reduction over data-parallel ranks plus one optimizer step."""
        ...

    def reduce_copies(self, model: Model, shards: int, copies: int) -> float:
        """Return the seconds to add up the gradients of `copies` copies of a model, each cut over `shards` neighbouring
        devices."""
        ...

    def prefill(self, model: Model, layout: Layout, batch: Batch) -> float:
        """Return the seconds until one rollout replica has read the prompts in `batch`."""
        ...

    def decode(self, model: Model, layout: Layout, sequences: Numbers, context_tokens: Numbers) -> Numbers:
        """Return the seconds of ONE decode step of one replica with `sequences` running that hold `context_tokens` in
        all. Works on arrays."""
        ...

    def verify(
        self, model: Model, layout: Layout, sequences: Numbers, drafted: float, context_tokens: Numbers
    ) -> Numbers:
        """As `decode`, with a drafter that has `drafted` tokens for each sequence."""
        ...

    def transfer(self, model: Model, source: Placement, target: Placement) -> float:
        """Return the seconds to move the weights between placements; 0 when equal."""
        ...

    def sync(self, model: Model, source: Placement, target: Placement) -> float:
        """Return the seconds to hand new weights from training to the rollout: a transfer, and the seconds that the
        software needs even without a transfer."""
        ...

    def migrate(self, model: Model, layout: Layout, tokens: float) -> float:
        """Return the seconds to read `tokens` of moved samples again on their new replica."""
        ...

    def offload(self, size: float) -> float:
        """Return the seconds to move `size` bytes of one device to or from host memory."""
        ...

    def memory(
        self,
        model: Model,
        kind: CallKind,
        layout: Layout,
        *,
        microbatch: Batch | None = None,
        microbatches: int = 1,
        kv_tokens: float = 0.0,
        recompute: bool = True,
        offload: bool = False,
    ) -> Memory:
        """Return the bytes on the fullest device; `microbatch` is of one data-parallel rank, `kv_tokens` of one
        replica.

        `offload`: weights, gradients and optimizer states wait in host memory between calls, so they count as active.
        """
        ...

    def kv_capacity(self, model: Model, layout: Layout, free: float) -> int:
        """Return the tokens of KV cache of one replica that fit into `free` bytes per device."""
        ...
