"""Compiles a problem to flat arrays: one entry per op, so that algorithms work on integers.

Invariants (tests/unit/schedule/test_op_table.py):
- op ids count up through pipeline, stage, kind (F before B), micro-batch;
- `before[i]` is the op whose result op i consumes (-1: none) and `delay[i]` the transfer it waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Op

Orders = Sequence[Sequence[int]]
"""Op ids of each rank in running order."""


@dataclass(frozen=True)
class OpTable:
    """Arrays over the op ids of `problem`; `kind` is 0 for forward, 1 for backward."""

    problem: ScheduleProblem

    @cached_property
    def base(self) -> tuple[int, ...]:
        """Return the first op id of each pipeline."""
        starts = [0]
        for p in self.problem.pipelines:
            starts.append(starts[-1] + 2 * p.stages * p.microbatches)
        return tuple(starts[:-1])

    def id(self, pipeline: int, stage: int, kind: int, microbatch: int) -> int:
        return self.base[pipeline] + (2 * stage + kind) * self.problem.pipelines[pipeline].microbatches + microbatch

    @cached_property
    def _fields(self) -> NDArray[np.int64]:
        """Return columns: pipeline, stage, kind, microbatch, rank, before."""
        rows = []
        for i, p in enumerate(self.problem.pipelines):
            for s in range(p.stages):
                for kind in (0, 1):
                    for m in range(p.microbatches):
                        if kind == 0:
                            before = self.id(i, s - 1, 0, m) if s else -1
                        else:
                            before = self.id(i, s + 1, 1, m) if s + 1 < p.stages else self.id(i, s, 0, m)
                        rows.append((i, s, kind, m, p.ranks[s], before))
        return np.array(rows, dtype=np.int64)

    @cached_property
    def pipeline(self) -> NDArray[np.int64]:
        return self._fields[:, 0].copy()

    @cached_property
    def stage(self) -> NDArray[np.int64]:
        return self._fields[:, 1].copy()

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        return self._fields[:, 2].copy()

    @cached_property
    def microbatch(self) -> NDArray[np.int64]:
        return self._fields[:, 3].copy()

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        return self._fields[:, 4].copy()

    @cached_property
    def before(self) -> NDArray[np.int64]:
        return self._fields[:, 5].copy()

    @cached_property
    def delay(self) -> NDArray[np.float64]:
        """Return the transfer time between the end of `before[i]` and the start of op i."""
        crosses = (self.before >= 0) & (self.rank != self.rank[self.before])
        return np.where(crosses, self.problem.transfer, 0.0)

    @cached_property
    def duration(self) -> NDArray[np.float64]:
        pipelines = self.problem.pipelines
        costs = [(pipelines[p].backward if kind else pipelines[p].forward)[s] for p, s, kind in self._fields[:, :3]]
        return np.array(costs, dtype=np.float64)

    @cached_property
    def activation(self) -> NDArray[np.float64]:
        """Return the memory held between the start of the forward and the end of the backward, repeated for both
        ops."""
        return np.array([self.problem.pipelines[p].activation[s] for p, s in self._fields[:, :2]], dtype=np.float64)

    @cached_property
    def on_rank(self) -> tuple[NDArray[np.int64], ...]:
        """Return the op ids of each rank, ascending."""
        return tuple(np.flatnonzero(self.rank == r) for r in range(self.problem.ranks))

    def __len__(self) -> int:
        return len(self._fields)

    def ops(self, starts: NDArray[np.float64]) -> tuple[Op, ...]:
        """Return the timed ops for start times by op id."""
        ends = starts + self.duration
        fields = self._fields[:, :5].tolist()
        return tuple(
            Op(rank, pipeline, "B" if kind else "F", microbatch, start, end)
            for (pipeline, _, kind, microbatch, rank), start, end in zip(
                fields, starts.tolist(), ends.tolist(), strict=True
            )
        )
