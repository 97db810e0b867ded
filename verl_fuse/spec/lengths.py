"""Describes a distribution of token lengths, exact and finite: values and their probabilities.

Invariants (tests/unit/spec/test_lengths.py):
- values are whole numbers >= 1, ascending, each once; probabilities are positive and sum to one;
- the text of every distribution but an empirical one parses back to an equal distribution;
- a length above the maximum is cut to the maximum, like in generation, not drawn again.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from verl_fuse.errors import FuseError

_FORMS = (
    "fixed:512",
    "uniform:1-2048",
    "lognormal:median=400,sigma=1.0,max=2048",
    "bimodal:short=200,long=1600,share=0.1,sigma=0.3,max=2048",
)
LONGEST_LENGTH = 2**22


@dataclass(frozen=True)
class LengthDistribution:
    """`text` names the distribution; two are equal when text, values and probabilities are."""

    text: str
    values: tuple[int, ...] = field(repr=False)
    probabilities: tuple[float, ...] = field(repr=False)

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return `count` lengths, int64."""
        values, cumulative = self._table
        return values[np.searchsorted(cumulative, rng.random(count), side="right")]

    @cached_property
    def mean(self) -> float:
        return float(np.dot(self.values, self.probabilities))

    @cached_property
    def mean_square(self) -> float:
        return float(np.dot(np.square(self.values, dtype=np.float64), self.probabilities))

    @property
    def maximum(self) -> int:
        return self.values[-1]

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        # All but the last step: a draw of 0.999… then always falls on a value.
        return np.array(self.values, dtype=np.int64), np.cumsum(self.probabilities)[:-1]

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "LengthDistribution":
        """Parse the text form; a FuseError lists the forms."""
        kind, _, rest = text.strip().partition(":")
        if kind == "fixed":
            return _fixed(text, rest)
        if kind == "uniform":
            return _uniform(text, rest)
        if kind == "lognormal":
            p = _parameters(text, rest, ("median", "sigma", "max"))
            return _from_steps(text, _lognormal_steps(p["median"], p["sigma"], _whole(text, "max", p["max"])))
        if kind == "bimodal":
            p = _parameters(text, rest, ("short", "long", "share", "sigma", "max"))
            if not 0 <= p["share"] <= 1:
                raise FuseError(f"lengths {text!r}: share={p['share']:g}; needs 0 to 1, the share of long ones")
            top = _whole(text, "max", p["max"])
            steps = [_lognormal_steps(p[mode], p["sigma"], top) for mode in ("short", "long")]
            return _from_steps(text, (1 - p["share"]) * steps[0] + p["share"] * steps[1])
        raise FuseError(
            f"lengths {text!r}: unknown form; allowed: {', '.join(_FORMS)}, or FILE#COLUMN, or RUN_DIR#response"
        )

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "LengthDistribution":
        """Return the empirical distribution of observed lengths."""
        found = list(lengths)
        if not found:
            raise FuseError("lengths: no values; needs at least one")
        # The check comes before the array: a whole number of a file need not fit into 64 bits.
        least, most = min(found), max(found)
        if least < 1 or most > LONGEST_LENGTH:
            raise FuseError(f"lengths: value {least if least < 1 else most}; needs 1 to {LONGEST_LENGTH}")
        array = np.asarray(found, dtype=np.int64)
        values, counts = np.unique(array, return_counts=True)
        digest = hashlib.sha256(np.stack([values, counts]).tobytes()).hexdigest()[:8]
        text = f"empirical:{array.size} values, mean {array.mean():.1f}, max {values[-1]}, sha {digest}"
        return cls(text, tuple(values.tolist()), tuple((counts / array.size).tolist()))


def _fixed(text: str, rest: str) -> LengthDistribution:
    # Numbers of thousands of digits are not even read.
    if not re.fullmatch(r"\d{1,9}", rest) or not 1 <= int(rest) <= LONGEST_LENGTH:
        raise FuseError(f"lengths {text!r}: needs a whole number from 1 to {LONGEST_LENGTH}, such as {_FORMS[0]}")
    return LengthDistribution(f"fixed:{int(rest)}", (int(rest),), (1.0,))


def _uniform(text: str, rest: str) -> LengthDistribution:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", rest)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= LONGEST_LENGTH:
        raise FuseError(f"lengths {text!r}: needs a range of whole numbers >= 1, such as {_FORMS[1]}")
    values = tuple(range(int(match[1]), int(match[2]) + 1))
    return LengthDistribution(f"uniform:{values[0]}-{values[-1]}", values, (1.0 / len(values),) * len(values))


def _lognormal_steps(median: float, sigma: float, top: int) -> np.ndarray:
    """Return the probabilities of 1..top: lengths rounded to the nearest token, at least one, cut at `top`."""
    edges = np.log((np.arange(1, top) + 0.5) / median) / (sigma * math.sqrt(2.0))
    below = np.array([0.5 * math.erfc(-edge) for edge in edges])
    return np.diff(below, prepend=0.0, append=1.0)


def _from_steps(text: str, steps: np.ndarray) -> LengthDistribution:
    kept = np.flatnonzero(steps > 0)
    share = steps[kept] / steps[kept].sum()
    return LengthDistribution(text.strip(), tuple((kept + 1).tolist()), tuple(share.tolist()))


def _parameters(text: str, rest: str, names: tuple[str, ...]) -> dict[str, float]:
    example = next(form for form in _FORMS if form.startswith(text.strip().split(":")[0]))
    found: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            found[key] = float(value)
        except ValueError:
            raise FuseError(f"lengths {text!r}: {part!r}; needs key=number as in {example}") from None
    if set(found) != set(names):
        raise FuseError(f"lengths {text!r}: needs exactly {', '.join(names)}, as in {example}")
    for key, value in found.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and key != "share"):
            raise FuseError(f"lengths {text!r}: {key}={value:g}; needs a number > 0")
    return found


def _whole(text: str, key: str, value: float) -> int:
    if value != int(value) or not 1 <= value <= LONGEST_LENGTH:
        raise FuseError(f"lengths {text!r}: {key}={value:g}; needs a whole number from 1 to {LONGEST_LENGTH}")
    return int(value)
