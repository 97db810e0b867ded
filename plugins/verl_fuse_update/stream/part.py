"""Computes the rows of one call of a streamed update on one rank.

The engine goes through them as in a lean update (lean/mini_batch.py), whose split into micro-batches and own log-probs
it takes over; old log-probs are the update's own, since parameters are those that generated the rows.

Invariants (tests/integration/test_stream_engines.py):
- every row that counts is computed once, or left out because every advantage of it is exactly 0;
- rows that are left out still count in what the loss is divided by, and in metrics of all samples;
- rows that only carry collectives add nothing to gradients, tokens, or metrics.
"""

from typing import Any

import torch
from verl.utils.tensordict_utils import assign_non_tensor

from verl_fuse_update.lean.mini_batch import LeanMiniBatch, Loss
from verl_fuse_update.lean.options import NO_ROW, ROW_FIELD, LeanOptions
from verl_fuse_update.lean.rows import lengths
from verl_fuse_update.stream.options import StreamOrder
from verl_fuse_update.stream.totals import StreamTotals


class StreamedRows(LeanMiniBatch):
    """The rows of one call: `data` of this rank, in the form of verl's mini-batches; `totals` take in their sums. Made
    and used within `alone`."""

    def __init__(
        self, engine: Any, data: Any, options: LeanOptions, loss: Loss, order: StreamOrder, totals: StreamTotals
    ) -> None:
        data[ROW_FIELD] = torch.arange(len(data)) if order.counts else torch.full((len(data),), NO_ROW)
        super().__init__(engine, data, options, loss, fresh=True)
        self._order, self._totals = order, totals
        self._rests = self._skips
        # Ranks of other groups have other numbers of rows: verl's own split would ask them.
        self._skips = True
        if not order.counts:
            self._kept, self._rest = [], []

    def compute(self) -> None:
        """Add the gradients of these rows to the existing gradients."""
        with self.computing():
            self._engine.forward_backward_batch(self._data, self.loss)
            if self._rests and self._options.metrics == "stock":
                self.forward_rest()
        if self._order.counts:
            all_lengths = lengths(self._data)
            self._totals.tokens += float(self._data["loss_mask"].values().sum())
            self._totals.lengths += [all_lengths[row] for row in self._kept]

    def loss(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        """Return verl's loss of a micro-batch, divided by the nominal number of tokens; its metrics are added up."""
        if self._order.deferred:
            assign_non_tensor(data, batch_num_tokens=self._order.nominal)
        loss, metrics = super().loss(model_output, data, dp_group)
        counts = bool((data[ROW_FIELD] != NO_ROW).any())
        tokens = float(data["response_mask"].values().sum()) if counts else 0.0
        self._totals.add(float(loss.detach()), metrics, tokens)
        # The engine would keep them, and the output of a call is not used.
        return loss, {}

    def _only_note(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        return self.loss(model_output, data, dp_group)
