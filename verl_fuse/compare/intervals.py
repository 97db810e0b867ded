"""Computes 95 % intervals of means over a few training steps on a machine that is not quiet.

Invariants (tests/unit/compare/test_intervals.py):
- the interval of equal values is that value; the interval of one value is not known;
- swapping two series inverts the interval of their ratio, and negates that of their difference;
- the intervals cover in at least 94 % of many runs where steps are independent, also with three steps; steps that are
  slow together are covered less often, and the test states how often.

The interval is Student's t of each step's contribution, so that few steps make it wide: a bootstrap of five steps
covers the truth in 83 % of all runs only. Where neighbouring steps are alike (another job on the machine, responses
that grow), the interval widens by their correlation (Bartlett 1935), and never narrows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
# Neighbouring steps are taken to be alike up to this correlation: the factor on the width is then 4.4.
_MOST_ALIKE = 0.9
_GRID = 20_001


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; `low` and `high` are None where there is one step only."""

    value: float
    low: float | None
    high: float | None

    def holds(self, value: float) -> bool:
        """Tell whether the interval does not exclude `value`."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def __neg__(self) -> "Interval":
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return Interval(-self.value, low, high)

    @property
    def inverse(self) -> "Interval":
        """The interval of 1 / value, of values > 0: times as fast, of a ratio of seconds."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Interval(1 / self.value, low, high)


def mean(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of steps' values, in their order."""
    series = np.asarray(values, np.float64)
    value, half = float(series.mean()), _half_width(series - series.mean())
    return Interval(value, None, None) if half is None else Interval(value, value - half, value + half)


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the interval of `second - first`, step by step: both hold the same steps."""
    return mean(np.subtract(second, first).tolist())


def ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the interval of mean(second) / mean(first), step by step; all values > 0. By the delta method, in
    logarithms."""
    one, other = (np.asarray(values, np.float64) for values in (first, second))
    value = float(other.mean() / one.mean())
    half = _half_width(other / other.mean() - one / one.mean())
    if half is None:
        return Interval(value, None, None)
    return Interval(value, value * math.exp(-half), value * math.exp(half))


@cache
def student_t(degrees: int) -> float:
    """Return Student's t that bounds `LEVEL` of all values, on either side of zero.

    With t = sqrt(degrees) tan(u), the density of u is proportional to cos(u) ** (degrees - 1).
    """
    angles = np.linspace(0.0, np.pi / 2, _GRID)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(LEVEL, below / below[-1], angles))


def autocorrelation(deviations: ArrayLike) -> float:
    """Return the correlation of neighbouring steps, 0 to 0.9; the estimate from n steps is too low by about 1 / n
    (Kendall 1954), which is added."""
    series = np.asarray(deviations, np.float64)
    total = float((series**2).sum())
    if len(series) < 3 or total == 0.0:
        return 0.0
    found = float((series[1:] * series[:-1]).sum()) / total + 1 / len(series)
    return min(max(0.0, found), _MOST_ALIKE)


def _half_width(deviations: NDArray[np.float64]) -> float | None:
    """Return half the interval of the mean of values with these deviations from the mean."""
    count = len(deviations)
    if count < 2:
        return None
    error = math.sqrt(float((deviations**2).sum()) / (count - 1) / count)
    correlation = autocorrelation(deviations)
    return student_t(count - 1) * error * math.sqrt((1 + correlation) / (1 - correlation))
