"""Adds up a rank's calls of one streamed update: tokens, losses, metrics.

Losses are divided by the nominal number of tokens before they are summed; `scaled` corrects the sums. A mean is
weighted by the number of its tokens.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.utils.metric import AggregationType, Metric


@dataclass
class StreamTotals:
    """The totals of step `step`: `tokens` that count, also of rows that were not computed; `seconds` in calls;
    `lengths` of computed rows in tokens."""

    step: int
    tokens: float = 0.0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    loss: float = 0.0
    _sums: dict[str, float] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)
    _same: dict[str, Any] = field(default_factory=dict)
    _weight: float = 0.0

    def add(self, loss: float, metrics: dict[str, Any], tokens: float) -> None:
        """Add a micro-batch of `tokens` that count; of one without any only the names are kept."""
        # Its means divide by nothing.
        weighs = tokens > 0
        self.loss += loss if weighs else 0.0
        self._weight += tokens
        for key, value in metrics.items():
            if not isinstance(value, Metric):
                self._same[key] = value
                continue
            one = float(value.aggregate()) if weighs else 0.0
            if value.aggregation is AggregationType.SUM:
                self._sums[key] = self._sums.get(key, 0.0) + one
            elif value.aggregation is AggregationType.MEAN:
                self._means[key] = self._means.get(key, 0.0) + one * tokens
            else:
                raise ValueError(f"metric {key!r} is aggregated by {value.aggregation}; allowed: a sum or a mean")

    @property
    def weight(self) -> float:
        """Return the tokens that means are of."""
        return self._weight

    def scaled(self, scale: float, weight: float) -> dict[str, Any]:
        """Return metrics as verl's update has them, one value of this rank: verl takes the mean of all ranks. `weight`:
        the mean of all ranks' weights."""
        sums = {key: Metric(AggregationType.SUM, one * scale) for key, one in self._sums.items()}
        means = {key: Metric(AggregationType.MEAN, one / max(weight, 1.0)) for key, one in self._means.items()}
        return sums | means | {key: [value] for key, value in self._same.items()}
