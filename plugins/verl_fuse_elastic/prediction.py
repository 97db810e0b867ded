"""Predict the length of responses from a prompt's earlier visits, and where there was none, from its data set
(RLHFless, section 4).

Invariants (tests/unit/elastic/test_prediction.py):
- a prompt that was visited is predicted from its own visits, of which the newest counts most;
- a prompt that was not visited is predicted from recent responses to prompts of its source, or of all sources where its
  own source has none;
- nothing is predicted before anything was seen;
- the state written with a checkpoint makes the predictions of the state in memory.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from verl_fuse.spec.kept import amount, whole
from verl_fuse.spec.prompts import Prediction, Prompt

# Weight of the newest visit in a prompt's average.
NEWEST = 0.5
# Quantiles are taken from so many responses per source, and from so many errors of predictions.
WINDOW = 2048
UPPER = 0.9


class LengthPredictor:
    """The mean response tokens of every prompt by key, recent response lengths by source, and recent errors of
    predictions."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._recent: dict[str, deque[int]] = {}
        self._errors: deque[float] = deque(maxlen=WINDOW)

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction] | None:
        """Return one prediction per prompt; None before any response was seen."""
        if not self._recent:
            return None
        spread = max(1.0, float(np.quantile(self._errors, UPPER))) if self._errors else 1.0
        unseen: dict[str, Prediction] = {}
        found = []
        for prompt in prompts:
            mean = self._means.get(prompt.key)
            if mean is not None:
                found.append(Prediction(mean, mean * spread))
                continue
            if prompt.source not in unseen:
                unseen[prompt.source] = self._of_source(prompt.source)
            found.append(unseen[prompt.source])
        return found

    def _of_source(self, source: str) -> Prediction:
        lengths = self._recent.get(source) or list(chain.from_iterable(self._recent.values()))
        middle, upper = np.quantile(lengths, [0.5, UPPER])
        return Prediction(float(middle), float(upper))

    def observe(self, visits: Iterable[tuple[Prompt, Sequence[int]]]) -> None:
        """Take in the response lengths of the samples of each prompt."""
        for prompt, lengths in visits:
            if not lengths:
                continue
            mean = sum(lengths) / len(lengths)
            before = self._means.get(prompt.key)
            if before:
                self._errors.extend(length / before for length in lengths)
            self._means[prompt.key] = mean if before is None else NEWEST * mean + (1 - NEWEST) * before
            self._recent.setdefault(prompt.source, deque(maxlen=WINDOW)).extend(lengths)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return {
            "means": self._means,
            "recent": {source: list(lengths) for source, lengths in self._recent.items()},
            "errors": list(self._errors),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LengthPredictor":
        """Return the predictor that `data` was written from. Raises the errors that `Kept.parse` may raise on anything
        else."""
        self = cls()
        self._means = {str(key): amount(mean) for key, mean in data["means"].items()}
        for source, lengths in data["recent"].items():
            if not lengths:
                raise ValueError(f"no length of {source!r}")
            self._recent[str(source)] = deque(map(whole, lengths), maxlen=WINDOW)
        self._errors = deque(map(amount, data["errors"]), maxlen=WINDOW)
        return self


def afterwards(prompts: Mapping[str, Prompt], lengths: Mapping[str, Sequence[int]]) -> list[Prompt]:
    """Return the prompts that have response `lengths`, both by uid, with the mean and the longest of these in place of
    the prediction."""
    return [
        replace(prompts[uid], prediction=Prediction(sum(found) / len(found), max(found)))
        for uid, found in lengths.items()
        if found and uid in prompts
    ]


def calibration(visits: Sequence[tuple[Prediction, Sequence[int]]]) -> dict[str, float]:
    """Return how good predictions were: the rank correlation of predicted and mean lengths, and the share of samples
    below `upper` (meant: 0.9)."""
    pairs = [(prediction, lengths) for prediction, lengths in visits if lengths]
    below = [length <= prediction.upper for prediction, lengths in pairs for length in lengths]
    if not below:
        return {}
    predicted = np.array([prediction.tokens for prediction, _ in pairs])
    actual = np.array([sum(lengths) / len(lengths) for _, lengths in pairs])
    found = {"fuse/elastic_upper_coverage": float(np.mean(below))}
    correlation = rank_correlation(predicted, actual)
    return found if correlation is None else {**found, "fuse/elastic_rank_correlation": correlation}


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return Spearman's rho, where ties share their mean rank; None where one side is constant."""
    ranks = [_ranks(values) for values in (first, second)]
    return float(np.corrcoef(ranks)[0, 1]) if all(map(np.ptp, ranks)) else None


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]
