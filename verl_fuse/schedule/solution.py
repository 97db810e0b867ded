"""Holds the result of every method, and compares two results.

Invariants (tests/unit/schedule/test_solution.py): a smaller makespan wins, then a smaller peak, then a
smaller sum of per-rank peaks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
from numpy.typing import NDArray

from verl_fuse.errors import FuseError
from verl_fuse.schedule.bounds import makespan_bound, memory_bound
from verl_fuse.schedule.table import OpTable, Orders
from verl_fuse.schedule.timing import earliest_starts, makespan, rank_peaks, rounded
from verl_fuse.spec.schedule import Schedule

MAKESPAN_TOLERANCE = 1e-9
"""Relative; times are sums of floats."""


@dataclass(frozen=True)
class Solution:
    """Running orders with their start times."""

    orders: tuple[tuple[int, ...], ...]
    starts: NDArray[np.float64] = field(compare=False)
    makespan: float
    peaks: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @property
    def key(self) -> tuple[float, float, float]:
        """Return a key of which the smaller is better."""
        return (self.makespan, self.peak, rounded(sum(self.peaks)))


@dataclass(frozen=True)
class Bounds:
    """Proven lower bounds: on the makespan, and on the peak memory of schedules that end by `deadline`."""

    makespan: float
    memory: float
    deadline: float


@dataclass
class Budget:
    """The time of a method, and the receiver of its progress.

    `report(text)` receives progress lines. Methods stop at `deadline` (a `time.monotonic` value) and on
    KeyboardInterrupt return the best so far, having set `stopped`, which a budget shares with its parts.
    """

    seconds: float
    seed: int = 0
    workers: int = 2
    report: Callable[[str], None] = lambda text: None
    begun: float = field(default_factory=time.monotonic)
    stopped: Event = field(default_factory=Event)

    @property
    def deadline(self) -> float:
        return self.begun + self.seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        return 0.0 if self.stopped.is_set() else max(0.0, self.deadline - time.monotonic())

    def part(self, seconds: float) -> "Budget":
        """Return a budget of at most `seconds` out of the seconds left."""
        return replace(self, seconds=min(seconds, self.left), begun=time.monotonic())


def from_orders(table: OpTable, orders: Orders) -> Solution | None:
    """Return the earliest-start schedule of `orders`; None when they deadlock."""
    starts = earliest_starts(table, orders)
    if starts is None:
        return None
    return from_starts(table, orders, starts)


def from_starts(table: OpTable, orders: Orders, starts: NDArray[np.float64]) -> Solution:
    return Solution(
        tuple(map(tuple, orders)), starts, makespan(table, starts), tuple(rank_peaks(table, orders).tolist())
    )


def trivial_bounds(table: OpTable, deadline: float) -> Bounds:
    """Return the closed-form bounds for schedules that end by `deadline`."""
    return Bounds(makespan_bound(table), memory_bound(table, deadline), deadline)


def finish(table: OpTable, solution: Solution, bounds: Bounds, seconds: float, method: str) -> Schedule:
    """Return the schedule file's contents for a solution and the bounds proven for it."""
    if bounds.deadline < solution.makespan * (1 - MAKESPAN_TOLERANCE):
        raise FuseError(f"memory bound proven for makespan {bounds.deadline:g}, not for {solution.makespan:g}")
    return Schedule(
        problem=table.problem,
        ops=table.ops(solution.starts),
        makespan=solution.makespan,
        lower_bound=bounds.makespan,
        optimal=solution.makespan <= bounds.makespan * (1 + MAKESPAN_TOLERANCE),
        peak_memory=solution.peak,
        memory_lower_bound=bounds.memory,
        memory_optimal=solution.peak <= bounds.memory * (1 + MAKESPAN_TOLERANCE),
        solve_seconds=seconds,
        method=method,
    )
