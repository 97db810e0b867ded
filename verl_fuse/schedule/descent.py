"""Walks down one goal at a time: first the makespan, then the peak memory at that makespan.

A goal is a makespan to reach within a memory capacity. Attempts (annealing, constraint solving) pursue the same goal side by side and the first to
reach or refute it ends the round; a round without either is repeated with more effort, or with a goal easier to reach.

Invariants (tests/unit/schedule/test_descent.py):
- a bound rises only when a goal is refuted, and only by what was refuted;
- the clock and Ctrl-C end the walk with the best solution so far.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from verl_fuse.schedule.bounds import makespan_bound, memory_bound
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.model import scales
from verl_fuse.schedule.serial import serial
from verl_fuse.schedule.solution import TOLERANCE, Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable

MAKESPAN_SHARE = 0.6
"""Part of the time that the makespan may take before memory has its turn."""

LEAN = 1.4
"""Capacity of the lean rounds, as a multiple of what serial 1F1B holds."""

CAPACITIES = 3
"""Capacities tried with one effort."""

FIRST_EFFORT = 0.5
"""About seconds of one core for each attempt; doubled with each fruitless round."""

FIRST_MEMORY_EFFORT = 3.0
"""The same for memory, where little effort reaches nothing."""


class Goal:
    """A makespan to reach while holding at most `capacity` on every rank; `closest` is the best so far that keeps the capacity."""

    def __init__(
        self, makespan: float, capacity: float, incumbent: Solution, deadline: float, accept: Callable[[Solution], None]
    ) -> None:
        self.makespan, self.capacity, self.incumbent, self.deadline = makespan, capacity, incumbent, deadline
        self.refuted_below: float | None = None
        self.closest = incumbent if incumbent.peak <= capacity * (1 + TOLERANCE) else None
        self._accept, self._lock, self._event = accept, threading.Lock(), threading.Event()

    @property
    def over(self) -> bool:
        """Reached, refuted, out of time or stopped."""
        return self._event.is_set() or time.monotonic() >= self.deadline

    @property
    def reached(self) -> bool:
        return self.incumbent.peak <= self.capacity * (1 + TOLERANCE) and self.incumbent.makespan <= self.makespan * (
            1 + TOLERANCE
        )

    def offer(self, solution: Solution) -> None:
        """Hand in a solution; the better one is kept. One that is fast enough but over the capacity still counts when it holds less than the best."""
        if solution.peak > self.capacity * (1 + TOLERANCE):
            with self._lock:
                if solution.makespan <= self.makespan * (1 + TOLERANCE) and solution.peak < self.incumbent.peak:
                    self.incumbent = solution
                    self._accept(solution)
            return
        with self._lock:
            reached = solution.makespan <= self.makespan * (1 + TOLERANCE)
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
            if makespan > self.makespan * (1 + TOLERANCE):
                self._event.set()

    def stop(self) -> None:
        self._event.set()


class Attempt(ABC):
    """One way to pursue a goal."""

    @abstractmethod
    def run(self, goal: Goal, effort: float, seed: int) -> None:
        """Offer solutions to the goal until it is over or about `effort` seconds of one core are spent."""

    def interrupt(self) -> None:  # noqa: B027 (an attempt that polls `goal.over` needs nothing here)
        """Called, perhaps repeatedly, when the goal is over and `run` has not returned."""


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


def descend(table: OpTable, budget: Budget, attempts: Sequence[Attempt]) -> tuple[Solution, Bounds]:
    """Best solution within the budget, with the bounds proven on the way."""
    walk = _Walk(table, budget, attempts)
    try:
        walk.shorten()
        walk.slim()
    except KeyboardInterrupt:
        budget.report("interrupted: returning the best schedule so far")
    best = walk.best
    memory = (
        max(walk.memory_bound, memory_bound(table, best.makespan))
        if walk.memory_deadline == best.makespan
        else memory_bound(table, best.makespan)
    )
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
        self.rounds = 0

    def _accept(self, solution: Solution) -> None:
        if solution.key < self.best.key:
            self.best = solution
            self.budget.report(
                f"makespan {solution.makespan:g} (bound {self.makespan_bound:g})  peak memory {solution.peak:g}"
            )

    def _round(self, makespan: float, capacity: float, effort: float, deadline: float) -> Goal:
        goal = Goal(makespan, capacity, self.best, min(deadline, self.budget.deadline), self._accept)
        self.rounds += 1
        pursue(goal, self.attempts, self.budget.workers, effort, self.budget.seed + self.rounds)
        return goal

    def shorten(self) -> None:
        """Makespan: aim at the bound until it is reached, or its share of the time is spent.

        Every other round, the first included, aims at little memory too: the bound is often reached all the same, and memory then starts lower.
        """
        effort, deadline = FIRST_EFFORT, self.budget.begun + MAKESPAN_SHARE * self.budget.seconds
        lean = min(self.limit, LEAN * serial(self.table, self.budget).peak)
        while self.best.makespan > self.makespan_bound * (1 + TOLERANCE) and time.monotonic() < deadline:
            capacity = lean if self.rounds % 2 == 0 else self.limit
            goal = self._round(self.makespan_bound, capacity, effort, deadline)
            if goal.refuted_below is not None and capacity == self.limit:
                self.makespan_bound = min(max(self.makespan_bound, goal.refuted_below), self.best.makespan)
            elif self.rounds % 2 == 0:
                effort *= 2

    def slim(self) -> None:
        """Memory at the makespan reached. Each sweep aims at what serial training holds, or just below the best, then half-way back, with more effort."""
        makespan = self.memory_deadline = self.best.makespan
        self.memory_bound = memory_bound(self.table, makespan)
        tick = scales(self.table).memory.value(1)
        serial_peak, effort = serial(self.table, self.budget).peak, FIRST_MEMORY_EFFORT
        while self._fat:
            capacity = min(max(serial_peak, self.memory_bound), self.best.peak - tick)
            for _ in range(CAPACITIES):
                goal = self._round(makespan, max(capacity, self.memory_bound), effort, self.budget.deadline)
                if goal.refuted_below is not None and goal.refuted_below > makespan:
                    self.memory_bound = min(self.best.peak, max(self.memory_bound, capacity + tick))
                self.budget.report(
                    f"peak memory {self.best.peak:g} (bound {self.memory_bound:g}) at makespan {makespan:g}, tried {capacity:g}"
                )
                capacity = (capacity + self.best.peak) / 2
                if goal.reached or not self._fat or capacity > self.best.peak - tick:
                    break
            effort *= 2

    @property
    def _fat(self) -> bool:
        """Whether time is left to look for less memory."""
        return self.best.peak > self.memory_bound * (1 + TOLERANCE) and self.budget.left > 0
