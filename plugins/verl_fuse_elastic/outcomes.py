"""Learn from finished steps by how much the forecast of each number of replicas misses. Pure.

The cost of one replica's decoding does not show that replicas share cores, memory and the processes that send requests
and take samples. More replicas may therefore gain less than forecast, or be slower. The miss of a forecast, as a
logarithm, has two parts: a level, common to all numbers, and a slope over the logarithm of the number. Only the slope
changes the best number, and only steps of different numbers tell the slope. A Kalman filter estimates both.

Invariants (tests/unit/elastic/test_outcomes.py):
- forecasts that miss by a constant factor are right after a few steps, for any number of replicas;
- steps of the first number tell the level and leave the slope alone;
- a slope counts by as much as it is above half of its standard deviation, for seconds and for replica-seconds;
- for a choice, a number up to twice or half the last one is as much better as the slope is unknown;
- a slope that is known leaves nothing to hope for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from verl_fuse_elastic.scaling import Forecast

# Standard deviations of logarithms: STEP_MISS of one step's miss around level and slope; FIRST_LEVEL and FIRST_SLOPE
# before the first step; LEVEL_MOVES and SLOPE_MOVES of their changes from step to step.
STEP_MISS = 0.1
FIRST_LEVEL, LEVEL_MOVES = 0.5, 0.02
FIRST_SLOPE, SLOPE_MOVES = 0.7, 0.01
# A slope counts by its part above DOUBTED standard deviations. A slope whose deviation is below KNOWN is known.
DOUBTED, KNOWN = 0.5, 0.1


@dataclass
class Outcomes:
    """Level and slope of the misses, of seconds and of replica-seconds. The level is that of `_first` replicas, the
    number in the first step; `_last` replicas ran in the last one."""

    _first: int = 0
    _last: int = 0
    _means: np.ndarray = field(default_factory=lambda: np.zeros((2, 2)))
    _covariance: np.ndarray = field(default_factory=lambda: np.diag([FIRST_LEVEL**2, FIRST_SLOPE**2]))

    def learn(self, model: Forecast, seconds: float, held: float) -> None:
        """Take in a step that took `seconds` and `held` replica-seconds, where `model` is its forecast."""
        working = model.replica_seconds - model.starting
        if min(model.seconds, working, seconds, held) <= 0:
            return
        self._first, self._last = self._first or model.count, model.count
        at = self._at(self._last)
        covariance = self._covariance + np.diag([LEVEL_MOVES**2, SLOPE_MOVES**2])
        gain = covariance @ at / (at @ covariance @ at + STEP_MISS**2)
        missed = np.array([log(seconds / model.seconds), log(held / working)])
        self._means = self._means + np.outer(gain, missed - at @ self._means)
        self._covariance = covariance - np.outer(gain, at @ covariance)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        arrays = {"means": self._means.tolist(), "covariance": self._covariance.tolist()}
        return {"first": self._first, "last": self._last, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Outcomes":
        """Return the outcomes that `data` was written from. Raises the errors that `Kept.parse` may raise on anything
        else."""
        first, last = int(data["first"]), int(data["last"])
        means, covariance = (np.array(data[name], dtype=float) for name in ("means", "covariance"))
        good = means.shape == covariance.shape == (2, 2) and np.isfinite(means).all() and np.isfinite(covariance).all()
        if not good or np.linalg.eigvalsh(covariance)[0] <= 0 or min(first, last) < 0 or bool(first) != bool(last):
            raise ValueError(f"{data!r} where outcomes of steps are expected")
        return cls(first, last, means, covariance)

    @property
    def uncertainty(self) -> float:
        """Return the standard deviation of the slope."""
        return float(self._covariance[1, 1]) ** 0.5

    def without_slope(self, count: int, held: float) -> float:
        """Return the replica-seconds that `count` replicas would have held if the slope were 0."""
        return held * exp(-float(self._means[1, 1]) * log(count / (self._first or count)))

    def expected(self, model: Forecast) -> Forecast:
        """Return what a number of replicas will take, from its forecast by the `model`."""
        if not self._last:
            return model
        slope = self._means[1]
        certain = np.sign(slope) * np.maximum(0.0, np.abs(slope) - DOUBTED * self.uncertainty)
        missed = self._at(self._last) @ self._means + log(model.count / self._last) * certain
        return _scaled(model, *np.exp(missed).tolist())

    def hoped(self, model: Forecast) -> Forecast:
        """Return what a number of replicas is chosen by."""
        expected, (less, more) = self.expected(model), sorted((model.count, self._last))
        if not 0 < more <= 2 * less:
            return expected
        better = exp(-max(0.0, self.uncertainty - KNOWN) * log(more / less))
        return _scaled(expected, better, better)

    def _at(self, count: int) -> np.ndarray:
        return np.array([1.0, log(count / self._first)])


def _scaled(forecast: Forecast, of_seconds: float, of_held: float) -> Forecast:
    working = forecast.replica_seconds - forecast.starting
    return replace(
        forecast, seconds=of_seconds * forecast.seconds, replica_seconds=of_held * working + forecast.starting
    )
