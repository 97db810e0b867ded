"""Compare a run with stock verl's, in numbers, time and memory.

Invariants (tests/unit/upstream/test_ab_compare.py):
- a run that failed, a missing step, or a quantity, row, parameter or metric that only one run has is a fault, never
  left out;
- numbers are compared on replayed rollouts only, and the rollouts are compared with them;
- a run in which verl-fuse left its work undone, or did some work though switched off, is a fault, however equal its
  numbers;
- without a tolerance, equal means the same bits; with a tolerance, a number that is not finite in one run alone is a
  fault.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ci.upstream.ab.record import PARAMETERS, Quantity, Record, Step

# The quantities that the rollout gives to a step: without the same bits in every run, no other comparison means
# anything.
GIVEN = ("padding", "responses", "response_mask", "rm_scores")
# verl's metrics of computed and learned numbers; all other metrics are times, memory, or verl-fuse's.
LEARNED = ("actor/", "critic/", "training/rollout_")
MEASURED = "/perf/"
OURS = "fuse/"


@dataclass(frozen=True)
class Tolerance:
    """The largest absolute differences in float32: of the numbers of the first step, and of all others; metrics are
    compared like in math.isclose."""

    first_step: float
    later: float
    metric_relative: float
    metric_absolute: float


@dataclass(frozen=True)
class Bands:
    """The largest ratios to stock verl: median seconds of replayed and of generating steps, peak memory."""

    replayed: float
    live: float
    memory: float


@dataclass(frozen=True)
class Expected:
    """The equality that a run owes to stock verl: without a tolerance, the same bits. `sign` is the metric of verl-fuse
    that is above 0 in every replayed step in which verl-fuse works; None: verl-fuse is off and logs nothing."""

    sign: str | None
    tolerance: Tolerance | None
    bands: Bands


@dataclass(frozen=True)
class Finding:
    """One comparison: its subject, the value, the allowed value, and the place of the worst value."""

    kind: Literal["run", "numbers", "metrics", "time", "memory"]
    what: str
    value: float
    allowed: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Tell whether the value is allowed; NaN never is."""
        return self.value <= self.allowed


def compare(stock: Record, run: Record, expected: Expected, paces: Sequence[Record] = ()) -> list[Finding]:
    """Return all findings about `run`. `paces` are further runs that did stock verl's work: the fastest sets the pace,
    because disturbances make a measurement slower."""
    if failures := [failure(record) for record in (stock, run) if record.code != 0]:
        return failures
    odd = sorted(stock.steps.keys() ^ run.steps.keys())
    both = sorted(stock.replayed.keys() & run.replayed.keys())
    numbers = (step_findings(step, stock.steps[step], run.steps[step], expected.tolerance) for step in both)
    return [
        Finding("run", "steps that only one run has", len(odd), 0, ", ".join(map(str, odd))),
        Finding("run", "no replayed step to compare", float(not both), 0),
        sign_finding(run, expected.sign),
        *(finding for step in numbers for finding in step),
        *resource_findings(stock, run, expected.bands, paces),
    ]


def failure(record: Record) -> Finding:
    """Return the fault of a run that failed."""
    return Finding("run", f"{record.name} {record.ending}", 1, 0)


def sign_finding(run: Record, sign: str | None) -> Finding:
    """Return the steps in which verl-fuse left its work undone, or, where verl-fuse is off, left a metric."""
    if sign is None:
        what = "steps with metrics of verl-fuse, which is off"
        wrong = [number for number, step in run.steps.items() if any(name.startswith(OURS) for name in step.metrics)]
    else:
        what = f"replayed steps without {sign}"
        wrong = [number for number, step in run.replayed.items() if not step.metrics.get(sign, 0) > 0]
    return Finding("run", what, len(wrong), 0, ", ".join(map(str, wrong)))


def step_findings(number: int, stock: Step, run: Step, tolerance: Tolerance | None) -> Iterator[Finding]:
    """Yield one finding per quantity and per metric of one replayed step."""
    for name in (*GIVEN, *sorted((stock.numbers.keys() | run.numbers.keys()) - set(GIVEN))):
        value, item = quantity_difference(stock.numbers.get(name, {}), run.numbers.get(name, {}))
        if tolerance is None or name in GIVEN:
            allowed = 0.0
        else:
            allowed = tolerance.first_step if number == 1 and PARAMETERS not in name else tolerance.later
        yield Finding("numbers", name, value, allowed, f"step {number}, {item}" if value else "")
    for name in sorted(stock.metrics.keys() | run.metrics.keys()):
        if name.startswith(LEARNED) and MEASURED not in name:
            left, right = (np.float64(step.metrics.get(name, math.nan)) for step in (stock, run))
            value = difference(left, right) if name in stock.metrics and name in run.metrics else math.inf
            if tolerance is None:
                allowed = 0.0
            else:
                # The tolerance is of the smaller value: an infinite metric must not allow everything.
                relative = tolerance.metric_relative * float(np.fmin(abs(left), abs(right)))
                allowed = max(tolerance.metric_absolute, relative)
            yield Finding("metrics", name, value, allowed, f"step {number}" if value else "")


def quantity_difference(stock: Quantity, run: Quantity) -> tuple[float, str]:
    """Return the largest difference and its item; infinite where only one run has the item, or neither run has any."""
    items = stock.keys() | run.keys()
    found = [
        (difference(stock[item], run[item]) if item in stock and item in run else math.inf, item)
        for item in sorted(items)
    ]
    return max(found, default=(math.inf, "nothing"), key=lambda pair: pair[0])


def difference(left: np.ndarray | np.float64, right: np.ndarray | np.float64) -> float:
    """Return the largest absolute difference: 0 only for the same bits, infinite for another shape or type or for a NaN
    in one run alone."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    if left.tobytes() == right.tobytes():
        return 0.0
    one, other = np.atleast_1d(left).astype(np.float64), np.atleast_1d(right).astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    worst = float(np.abs(one - other, where=~same, out=np.zeros_like(one)).max())
    # The bits differ, so the difference is not 0, though it may be between 0.0 and -0.0.
    return math.inf if math.isnan(worst) else max(worst, math.ulp(0.0))


def resource_findings(stock: Record, run: Record, bands: Bands, paces: Sequence[Record]) -> Iterator[Finding]:
    """Yield ratios to stock: seconds of replayed steps (the first step warms up), of live steps, and peak memory."""
    for what, allowed, steps_of in (
        ("median seconds of a replayed step", bands.replayed, lambda record: without_first(record.replayed)),
        ("median seconds of a generating step", bands.live, lambda record: record.live),
    ):
        left = min(median_seconds(steps_of(record)) for record in (stock, *paces))
        right = median_seconds(steps_of(run))
        yield Finding("time", what, right / left, allowed, f"{left:.2f} s stock, {right:.2f} s here")
    ratio = run.peak_bytes / stock.peak_bytes if stock.peak_bytes else math.nan
    where = f"{stock.peak_bytes / 2**30:.2f} GiB stock, {run.peak_bytes / 2**30:.2f} GiB here"
    yield Finding("memory", "peak memory of all processes", ratio, bands.memory, where)


def without_first(steps: Mapping[int, Step]) -> dict[int, Step]:
    return {number: step for number, step in steps.items() if number > 1}


def median_seconds(steps: Mapping[int, Step]) -> float:
    """Return the median seconds of the steps; NaN if no step's time is known."""
    seconds = [step.seconds for step in steps.values() if step.seconds is not None]
    return statistics.median(seconds) if seconds else math.nan
