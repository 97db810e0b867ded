"""Tabulates the seconds that a generation replica takes for a decode step and for a prefill; the kernel integrates the
tables.

Invariants (tests/unit/simulate/test_timing.py):
- a table agrees with the cost it was built from at every grid point, and with its step-by-step sum to 1 % between them;
- every cost in a table is finite and positive.

All running sequences grow by one token per decode step, so the mean context of the running batch grows by exactly one.
A table with one row per batch size and the mean context as columns therefore gives the seconds of any run of steps as a
difference of two integrals.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.spec.arrays import Floats

DecodeSeconds = Callable[[Floats, Floats], Floats]
"""(sequences, context tokens of all of them together) -> seconds of one decode step of one replica; vectorised."""
PrefillSeconds = Callable[[float, float], float]
"""(sequences, tokens of each) -> seconds of prefilling them together."""

CONTEXT_POINTS = 257
PREFILL_POINTS = 49


@dataclass(frozen=True, eq=False)
class ReplicaTiming:
    """One replica: `decode[b, i]` seconds of a step of b sequences whose mean context is `i * spacing` tokens, and its
    integral over context.

    A prefill of n tokens takes the interpolation of (`prefill_tokens`, `prefill_seconds`), `request_seconds` per
    sequence, and `square_seconds` per squared token. `kv_capacity` tokens fit; at most `max_batch` sequences run; a
    step takes in new prompts up to `prefill_budget` tokens.
    """

    decode: Floats
    integral: Floats
    spacing: float
    prefill_tokens: Floats
    prefill_seconds: Floats
    request_seconds: float
    square_seconds: float
    max_batch: int
    kv_capacity: int
    prefill_budget: int

    @classmethod
    def build(
        cls,
        decode: DecodeSeconds,
        prefill: PrefillSeconds,
        *,
        max_batch: int,
        kv_capacity: int,
        longest: int,
        prefill_budget: int = 8192,
    ) -> "ReplicaTiming":
        """Tabulate the seconds; `longest` is the largest prompt plus response, in tokens, which the memory holds."""
        columns = min(CONTEXT_POINTS, longest + 1)
        context = np.linspace(0.0, float(longest), columns)
        sequences = np.arange(1, max_batch + 1, dtype=np.float64)
        table = np.empty((max_batch + 1, columns))
        table[1:] = decode(
            np.repeat(sequences, columns), np.outer(sequences, context).ravel().astype(np.float64)
        ).reshape(max_batch, -1)
        table[0] = table[1]
        spacing = context[1]
        integral = np.zeros_like(table)
        np.cumsum((table[:, 1:] + table[:, :-1]) * (spacing / 2), axis=1, out=integral[:, 1:])
        tokens = np.unique(np.geomspace(1, max(2, prefill_budget + longest), PREFILL_POINTS).round())
        request, square = _beyond_tokens(prefill, longest)
        seconds = np.array([_linear_seconds(prefill, n, request, square) for n in tokens])
        for name, values in (("decode", table), ("prefill", seconds)):
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise FuseError(f"{name} cost: {values.min()} to {values.max()} seconds; needs finite seconds > 0")
        return cls(
            table,
            integral,
            float(spacing),
            tokens,
            seconds,
            request,
            square,
            int(max_batch),
            int(kv_capacity),
            int(prefill_budget),
        )

    def step_seconds(self, sequences: int, mean_context: float) -> float:
        """Return the seconds of one decode step."""
        return float(np.interp(mean_context, np.arange(self.decode.shape[1]) * self.spacing, self.decode[sequences]))


_SHORT, _MANY = 16.0, 512.0
"""Tokens of a sequence whose attention is as good as free; sequences of which half fill a pipeline as deep as any model
has layers."""


def _linear_seconds(prefill: PrefillSeconds, tokens: float, request: float, square: float) -> float:
    """Return the seconds of prefilling `tokens` tokens in short sequences, without the cost of requests and
    attention."""
    each = min(tokens, _SHORT)
    return prefill(tokens / each, each) - request * tokens / each - square * tokens * each


def _beyond_tokens(prefill: PrefillSeconds, longest: int) -> tuple[float, float]:
    """Return the seconds per request and per squared token, from the cost of equally many tokens in short sequences, in
    sequences twice as long, and in the longest sequences."""
    short, double = prefill(_MANY, _SHORT), prefill(_MANY / 2, 2 * _SHORT)
    fewer = (short - double) / (_MANY / 2)
    if longest < 4 * _SHORT:
        return max(0.0, fewer), 0.0
    more = _MANY * longest / _SHORT
    longer = prefill(_MANY, float(longest)) - prefill(more, _SHORT)
    rows = np.array(
        [[_MANY / 2, -_MANY * _SHORT**2], [_MANY - more, _MANY * longest * (longest - _SHORT)]],
    )
    request, square = np.linalg.solve(rows, [short - double, longer])
    return max(0.0, float(request)), max(0.0, float(square))
