"""Walks down one goal at a time: first the makespan, then the peak memory at that makespan.

A goal is a makespan to reach within a memory capacity. Attempts (annealing, constraint solving) pursue the same goal
side by side and the first to reach or refute it ends the round; a round without either is repeated with more effort, or
with a goal easier to reach.

Invariants (tests/unit/schedule/test_descent.py):
- a bound rises only when a goal is refuted, and only as far as the refuted goal;
- the clock and Ctrl-C end the walk with the best solution so far.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from verl_fuse.schedule.bounds import makespan_bound, memory_bound
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.serial import serial
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE, Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales

MAKESPAN_SHARE = 0.6
"""Part of the time that the makespan may take before memory has its turn; what memory leaves
is the makespan's again."""

LEAN_CAPACITY = 1.4
"""Capacity of the lean rounds, as a multiple of what serial 1F1B holds."""

CAPACITIES = 3
"""Capacities tried in vain with one effort."""

FIRST_EFFORT = 0.5
"""About seconds of one core for each attempt."""

EFFORT_GROWTH = 3.0
"""How much the effort grows when a lean round and one without limits were fruitless."""

FIRST_MEMORY_EFFORT = 5.0
"""The same for memory, where little effort reaches nothing; doubled with each fruitless sweep."""


CLOSING_SECONDS_PER_OP = 4e-4
"""Seconds per op to end a walk in: a model being built is not interrupted, and the result is checked."""

CLOSING_SHARE = 0.05
"""Most of the time that may go there."""


class Goal:
    """A makespan to reach while holding at most `capacity` on every rank; `closest` is the best so far
    that keeps the capacity.

    `near` came closest to an earlier goal.
    """

    def __init__(
        self,
        makespan: float,
        capacity: float,
        incumbent: Solution,
        deadline: float,
        accept: Callable[[Solution], None],
        near: Solution | None = None,
    ) -> None:
        self.makespan, self.capacity, self.incumbent, self.deadline = makespan, capacity, incumbent, deadline
        self.refuted_below: float | None = None
        fitting = [s for s in (incumbent, near) if s is not None and s.peak <= capacity * (1 + MAKESPAN_TOLERANCE)]
        self.closest = min(fitting, key=lambda s: s.key, default=None)
        self._accept, self._lock, self._event = accept, threading.Lock(), threading.Event()

    @property
    def over(self) -> bool:
        """Tell whether the goal is reached, refuted, out of time or stopped."""
        return self._event.is_set() or time.monotonic() >= self.deadline

    @property
    def reached(self) -> bool:
        return self.incumbent.peak <= self.capacity * (
            1 + MAKESPAN_TOLERANCE
        ) and self.incumbent.makespan <= self.makespan * (1 + MAKESPAN_TOLERANCE)

    def offer(self, solution: Solution) -> None:
        """Hand in a solution; the better solution is kept. A solution that is fast enough but over the capacity still
        counts when it holds less than the best."""
        if solution.peak > self.capacity * (1 + MAKESPAN_TOLERANCE):
            with self._lock:
                if (
                    solution.makespan <= self.makespan * (1 + MAKESPAN_TOLERANCE)
                    and solution.peak < self.incumbent.peak
                ):
                    self.incumbent = solution
                    self._accept(solution)
            return
        with self._lock:
            reached = solution.makespan <= self.makespan * (1 + MAKESPAN_TOLERANCE)
            if self.closest is None or solution.makespan <= self.closest.makespan:
                self.closest = solution
            if solution.key < self.incumbent.key or (reached and not self.reached):
                self.incumbent = solution
            self._accept(solution)
            if reached:
                self._event.set()

    def refute(self, makespan: float) -> None:
        """Hand in a proof: within the capacity no schedule is shorter than `makespan`."""
        with self._lock:
            self.refuted_below = max(makespan, self.refuted_below or 0.0)
            if makespan > self.makespan * (1 + MAKESPAN_TOLERANCE):
                self._event.set()

    def stop(self) -> None:
        self._event.set()


class Attempt(ABC):
    """One way to pursue a goal."""

    @abstractmethod
    def run(self, goal: Goal, effort: float, seed: int) -> None:
        """Offer solutions to the goal until it is over or about `effort` seconds of one core are spent."""

    def interrupt(self) -> None:  # noqa: B027 (an attempt that polls `goal.over` needs nothing here)
        """End `run`; called, perhaps repeatedly, when the goal is over and `run` has not returned."""


def pursue(goal: Goal, attempts: Sequence[Attempt], workers: int, effort: float, seed: int) -> None:
    """Run the attempts on `workers` threads; on KeyboardInterrupt stop them, then let it through."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(attempt.run, goal, effort, seed) for attempt in attempts]
        try:
            while not all(future.done() for future in futures):
                _wait(goal, attempts)
        except KeyboardInterrupt:
            goal.stop()
            while not all(future.done() for future in futures):
                _wait(goal, attempts)
            raise
    for future in futures:
        future.result()


def _wait(goal: Goal, attempts: Sequence[Attempt]) -> None:
    time.sleep(0.02)
    if goal.over:
        for attempt in attempts:
            attempt.interrupt()


def descend(
    table: OpTable, budget: Budget, attempts: Sequence[Attempt], begin: Callable[[], Solution | None] = lambda: None
) -> tuple[Solution, Bounds]:
    """Return the best solution within the budget, with the bounds proven on the way; `begin` may hand in a
    solution to walk on from."""
    budget = budget.part(budget.left - min(CLOSING_SECONDS_PER_OP * len(table), CLOSING_SHARE * budget.seconds))
    walk = _Walk(table, budget, attempts)
    try:
        if (first := begin()) is not None:
            walk.accept(first)
        walk.shorten(MAKESPAN_SHARE)
        walk.slim()
        walk.shorten(1.0)
        walk.slim()
    except KeyboardInterrupt:
        budget.stopped.set()
        budget.report("interrupted: returning the best schedule so far")
    best = walk.best
    memory = memory_bound(table, best.makespan)
    if walk.memory_deadline == best.makespan:
        memory = max(memory, walk.memory_bound)
    return best, Bounds(walk.makespan_bound, min(memory, best.peak), best.makespan)


class _Walk:
    """The state of one descent."""

    def __init__(self, table: OpTable, budget: Budget, attempts: Sequence[Attempt]) -> None:
        self.table, self.budget, self.attempts = table, budget, attempts
        limit = table.problem.memory_limit
        self.limit = float("inf") if limit is None else limit
        self.best = candidates(table, self.limit)[0]
        self.makespan_bound = makespan_bound(table)
        self.memory_bound, self.memory_deadline = 0.0, -1.0
        self.near: Solution | None = None
        self.rounds, self.effort = 0, FIRST_EFFORT

    def accept(self, solution: Solution) -> None:
        """Walk on from this solution if it is better than the present solution."""
        if solution.key < self.best.key:
            self.best = solution
            self.budget.report(
                f"makespan {solution.makespan:g} (bound {self.makespan_bound:g})  peak memory {solution.peak:g}"
            )

    def _round(self, makespan: float, capacity: float, effort: float, deadline: float) -> Goal:
        deadline = min(deadline, self.budget.deadline)
        goal = Goal(makespan, capacity, self.best, deadline, self.accept, self.near)
        self.rounds += 1
        pursue(goal, self.attempts, self.budget.workers, effort, self.budget.seed + self.rounds)
        self.near = goal.closest
        return goal

    def shorten(self, share: float) -> None:
        """Shorten the makespan: aim at the bound until it is reached, or this share of the time is spent.

        Every other round aims at little memory too: annealing often reaches the bound all the same, and
        memory then starts lower.
        """
        deadline = self.budget.begun + share * self.budget.seconds
        lean = min(self.limit, LEAN_CAPACITY * serial(self.table, self.budget).peak)
        while (
            self.best.makespan > self.makespan_bound * (1 + MAKESPAN_TOLERANCE)
            and min(deadline - time.monotonic(), self.budget.left) > 0
        ):
            aims_low = self.rounds % 2 == 0
            capacity = lean if aims_low else self.limit
            goal = self._round(self.makespan_bound, capacity, self.effort, deadline)
            if goal.refuted_below is not None and capacity == self.limit:
                self.makespan_bound = min(max(self.makespan_bound, goal.refuted_below), self.best.makespan)
            elif not aims_low:
                self.effort = min(self.effort * EFFORT_GROWTH, self.budget.seconds)

    def slim(self) -> None:
        """Lower the memory at the makespan reached: right to the bound where serial 1F1B does not hold more, else
        half-way to the bound as long as this succeeds, and half-way back."""
        makespan = self.best.makespan
        if self.memory_deadline != makespan:
            self.memory_deadline, self.memory_bound = makespan, memory_bound(self.table, makespan)
        memory = scales(self.table).memory
        tick = memory.value(1)
        serial_peak, effort = serial(self.table, self.budget).peak, FIRST_MEMORY_EFFORT
        while self._fat:
            lowest, failures = max(serial_peak, self.memory_bound), 0
            if lowest >= self.best.peak:
                lowest = self.memory_bound
            capacity = lowest if lowest == self.memory_bound else (lowest + self.best.peak) / 2
            while failures < CAPACITIES and self._fat:
                capacity = max(memory.value(memory.floor(min(capacity, self.best.peak - tick))), self.memory_bound)
                goal = self._round(makespan, capacity, effort, self.budget.deadline)
                if goal.refuted_below is not None and goal.refuted_below > makespan:
                    self.memory_bound = min(
                        self.best.peak, max(self.memory_bound, memory.value(memory.floor(capacity) + 1))
                    )
                self.budget.report(
                    f"peak memory {self.best.peak:g} (bound {self.memory_bound:g}) at makespan {makespan:g}, tried "
                    f"{capacity:g}"
                )
                if not goal.reached:
                    lowest, failures = capacity, failures + 1
                capacity = (lowest + self.best.peak) / 2
            effort = min(effort * 2, self.budget.seconds)

    @property
    def _fat(self) -> bool:
        """Tell whether less memory is possible and time is left to look for it."""
        return self.best.peak > self.memory_bound * (1 + MAKESPAN_TOLERANCE) and self.budget.left > 0
