"""Searches the priorities of greedy list scheduling.

A change of one priority moves a micro-batch on every rank at once, which annealing, swapping two ops of one
rank at a time, finds hard.

Invariants (tests/unit/schedule/test_priorities.py): schedules keep the capacity; one seed gives one result.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from verl_fuse.schedule.bounds import tails
from verl_fuse.schedule.greedy import in_flight
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import Scales, activation_ticks

EXTRAS = (None, 0, 1, 2, 3, 4)
"""In-flight limits beyond 1F1B's to start from."""


class PrioritySearch:
    """Hill climbing on one bias per pipeline and kind, noise per stage, and the in-flight limits."""

    def __init__(self, table: OpTable, scales: Scales, capacity: float) -> None:
        from verl_fuse.schedule.dispatch import DispatchTables  # numba takes a second to import

        problem, ticks = table.problem, scales.time.ticks
        self.table, self.capacity = table, capacity
        stages = [(i, s) for i, p in enumerate(problem.pipelines) for s in range(p.stages)]
        index = {stage: at for at, stage in enumerate(stages)}
        self.pipeline = np.array([i for i, _ in stages], dtype=np.int64)
        rank = np.array([problem.pipelines[i].ranks[s] for i, s in stages], dtype=np.int64)
        microbatches = np.array([problem.pipelines[i].microbatches for i, _ in stages], dtype=np.int64)
        first = np.array([[table.id(i, s, kind, 0) for kind in (0, 1)] for i, s in stages], dtype=np.int64)
        activation = np.array([activation_ticks(table, scales, int(op)) for op in first[:, 0]], dtype=np.int64)
        on_rank = np.full((problem.ranks, int(np.bincount(rank).max())), -1, dtype=np.int64)
        for r in range(problem.ranks):
            here = np.flatnonzero(rank == r)
            on_rank[r, : len(here)] = here
        duration = np.array([max(1, ticks(d)) for d in table.duration.tolist()], dtype=np.int64)
        self.shop = DispatchTables(
            stages=on_rank,
            rank=rank,
            upstream=np.array([index.get((i, s - 1), -1) for i, s in stages], dtype=np.int64),
            downstream=np.array([index.get((i, s + 1), -1) for i, s in stages], dtype=np.int64),
            microbatches=microbatches,
            activation=activation,
            first=first,
            source=table.before,
            delay=np.array([ticks(d) for d in table.delay.tolist()], dtype=np.int64),
            duration=duration,
            urgency=np.array([ticks(t) for t in tails(table).tolist()], dtype=np.int64) + duration,
            capacity=scales.memory.floor(capacity) if np.isfinite(capacity) else int(activation @ microbatches) + 1,
        )
        self.limits = [
            np.array([n for row in in_flight(table, extra, capacity) for n in row], dtype=np.int64) for extra in EXTRAS
        ]

    def run(self, limits: NDArray[np.int64], bias: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Return the makespan in ticks (-1: stuck) and the start ticks of every op."""
        from verl_fuse.schedule.dispatch import dispatch

        start = np.empty(len(self.table), dtype=np.int64)
        return int(dispatch(self.shop, limits, bias, start)), start

    @property
    def neutral(self) -> NDArray[np.int64]:
        """Return biases of 0 for every stage and kind."""
        return np.zeros((len(self.pipeline), 2), dtype=np.int64)

    def climb(
        self, random: np.random.Generator, trials: int, over: Callable[[], bool] = lambda: False
    ) -> NDArray[np.int64] | None:
        """Return the start ticks of the best of `trials` schedules, or of the schedules made before `over()`; None when
        every schedule was stuck for memory."""
        best_end, best_start = -1, None
        limits, bias = self.limits[int(random.integers(len(self.limits)))], self.neutral
        for trial in range(trials):
            if over():
                break
            tried = (limits, bias) if trial == 0 else self._turned(random, limits, bias)
            end, start = self.run(*tried)
            if end >= 0 and (best_end < 0 or end <= best_end):
                best_end, best_start = end, start
                limits, bias = tried
            elif best_end < 0:
                limits = self.limits[int(random.integers(len(self.limits)))]
        return best_start

    def _turned(
        self, random: np.random.Generator, limits: NDArray[np.int64], bias: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a neighbour: one pipeline's bias, one stage's bias, or one stage's in-flight limit changed."""
        limits, bias, step = limits.copy(), bias.copy(), int(self.shop.duration.max()) * int(random.choice([1, 2, 8]))
        what, stage, kind = int(random.integers(3)), int(random.integers(len(limits))), int(random.integers(2))
        if what == 0:
            bias[self.pipeline == self.pipeline[stage], kind] += int(random.integers(-step, step + 1))
        elif what == 1:
            bias[stage, kind] += int(random.integers(-step, step + 1))
        else:
            limits[stage] = max(
                1, min(int(self.shop.microbatches[stage]), int(limits[stage]) + int(random.choice([-1, 1])))
            )
        return limits, bias
