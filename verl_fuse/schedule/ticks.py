"""Makes whole numbers for a solver that knows no other numbers.

Invariants (tests/unit/schedule/test_ticks.py):
- decimal inputs with a common small denominator are scaled exactly, so that a proof on ticks holds for the problem;
- otherwise durations are rounded to a fine grid and `exact` is False: orders carry over, proofs do not.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from verl_fuse.schedule.table import OpTable

MAX_SCALE = 10_000
GRID = 20_000
"""Ticks per longest duration when no exact scale exists."""


@dataclass(frozen=True)
class Scale:
    """`ticks = value * factor`; `exact` when the product is a whole number for all values the scale was made from."""

    factor: Fraction
    exact: bool

    def ticks(self, value: float) -> int:
        """Return the nearest tick."""
        return round(Fraction(repr(float(value))) * self.factor)

    def floor(self, value: float) -> int:
        """Return the tick at or below `value`, forgiving float noise."""
        return int(Fraction(repr(float(value))) * self.factor + Fraction(1, 10**6))

    def value(self, ticks: int) -> float:
        return float(ticks / self.factor)


def scale_for(values: list[float]) -> Scale:
    """Return the smallest exact scale for `values`, or a grid on the largest of them."""
    fractions = [Fraction(repr(float(v))) for v in set(values) if v > 0]
    if not fractions:
        return Scale(Fraction(1), True)
    denominator = 1
    for f in fractions:
        denominator = lcm(denominator, f.denominator)
        if denominator > MAX_SCALE:
            return Scale(Fraction(GRID) / max(fractions), False)
    return Scale(Fraction(denominator), True)


@dataclass(frozen=True)
class Scales:
    """Ticks of time and of memory."""

    time: Scale
    memory: Scale

    @property
    def exact(self) -> bool:
        return self.time.exact and self.memory.exact


def scales(table: OpTable) -> Scales:
    """Return the ticks of all times, and of all memory, of a problem."""
    problem = table.problem
    times = [problem.transfer, *(cost for p in problem.pipelines for cost in (*p.forward, *p.backward))]
    memory = [a for p in problem.pipelines for a in p.activation]
    return Scales(scale_for(times), scale_for(memory))


def time_ticks(table: OpTable, scales: Scales) -> tuple[list[int], list[int]]:
    """Return the delay and the duration of each op in ticks; an op takes one at least."""
    ticks = scales.time.ticks
    return list(map(ticks, table.delay.tolist())), [max(1, ticks(d)) for d in table.duration.tolist()]


def activation_ticks(table: OpTable, scales: Scales, op: int) -> int:
    """Return the activation in ticks, rounded up, so that a limit kept in ticks is kept."""
    ticks = scales.memory.ticks(float(table.activation[op]))
    return ticks + (scales.memory.value(ticks) < table.activation[op] * (1 - 1e-12))
