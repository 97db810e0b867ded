"""Puts turns of the steady state into a schedule of the shorter problem: CP-SAT makes room for one
turn that can follow itself.

The schedule is cut at one time. Ops that ran well before keep their start, ops well after their distance from the end;
between, CP-SAT places the rest and one turn, so that a rank's turn lies within one `period.length`, and so that every
result is in time when the turn runs `period.turns` times. One turn then costs its length, and memory after it is memory
before it: the longer schedule is as good as the shorter one.

Invariants (tests/unit/schedule/test_stretch.py): a result is a schedule of the whole problem, keeps the capacity, and
where durations are exact ends `turns * length` after the shorter one.
"""

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from verl_fuse.schedule.constraint_model import FOUND, solver_for
from verl_fuse.schedule.period import Period
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE, Solution, from_orders
from verl_fuse.schedule.ticks import activation_ticks, scales, time_ticks
from verl_fuse.schedule.timing import earliest, orders_of, tails_in_order

CUTS = (0.5, 0.4, 0.6, 0.3, 0.7)
"""Where to cut, as shares of the makespan."""

FREE_OPS = (60, 150, 300, 600)
"""Ops around the cut that are placed anew, beside the turn."""

CUT_SECONDS = 2.0
"""Deterministic time for one cut."""

Fifo = tuple[int, int, int]
"""Pipeline, stage, kind."""


def stretch(period: Period, solution: Solution, capacity: float, seed: int, deadline: float) -> Solution | None:
    """Return a schedule of `period.table` from one of `period.short`, within the capacity; None when no cut leaves room
    for a turn before the `deadline`.

    A schedule longer than promised, which too few turns for the micro-batches in flight can cause, is only returned
    when no other is found.
    """
    promised = (solution.makespan + period.turns * period.length) * (1 + MAKESPAN_TOLERANCE)
    best = None
    for free, share in itertools.product(FREE_OPS, CUTS):
        if time.monotonic() >= deadline:
            break
        found = _Cut(period, solution, share, free).solve(capacity, seed, deadline)
        if found is not None and (best is None or found.key < best.key):
            best = found
            if found.makespan <= promised:
                break
    return best


@dataclass
class _Fifo:
    """Ops of one stage and kind, grouped by turns: ids count up from `first`, the group of micro-batch m is (m -
    `offset`) // `each`, counted from -1.

    `turn` are the starts within the turn, and `done` is the number of groups that run before it.
    """

    first: int
    each: int
    offset: int
    duration: int
    delay: int
    source: Fifo | None
    turn: list[cp_model.IntVar]
    done: cp_model.LinearExpr | int = 0

    def at(self, microbatch: int) -> tuple[int, int]:
        """Return the group and the place in the group."""
        return divmod(microbatch - self.offset, self.each)


class _Cut:
    """The model of one cut, in the time of the shorter schedule with one turn put in: ops after the turn are a `length`
    later there."""

    def __init__(self, period: Period, solution: Solution, share: float, free: int) -> None:
        self.period, self.table = period, period.short
        self.scales = scales(self.table)
        self.length = max(1, self.scales.time.ticks(period.length))
        self.delay, self.duration = time_ticks(self.table, self.scales)
        self.orders, before = solution.orders, self.table.before.tolist()
        early = earliest(self.orders, before, self.delay, self.duration)
        assert early is not None, "the orders of a solution do not deadlock"
        self.early = early
        self.end = max(begin + length for begin, length in zip(early, self.duration, strict=True))
        tails = tails_in_order(self.orders, before, self.delay, self.duration, early)
        self.late = [self.end - tail for tail in tails]
        middle, reach = share * self.end, free / len(self.early) * self.end / 2
        self.left = {op for op, begin in enumerate(self.early) if begin < middle}
        self.free = {op for op, begin in enumerate(self.early) if middle - reach <= begin < middle + reach}
        self.model = cp_model.CpModel()
        self.start: list[cp_model.IntVar | int] = [0] * len(self.early)
        self.is_left: list[cp_model.IntVar] = [self.model.new_constant(0)] * len(self.early)
        self.fifos: dict[Fifo, _Fifo] = {}

    def solve(self, capacity: float, seed: int, deadline: float) -> Solution | None:
        for rank, order in enumerate(self.orders):
            if order and not self._rank(rank, order):
                return None
        self._precedences()
        if math.isfinite(capacity):
            self._limit(self.scales.memory.floor(capacity))
        solver = solver_for(seed, CUT_SECONDS, deadline)
        if solver.solve(self.model) not in FOUND:
            return None
        starts = self._repeated(solver)
        return from_orders(self.period.table, orders_of(self.period.table, starts))

    def _repeated(self, solver: cp_model.CpSolver) -> NDArray[np.float64]:
        """Return the starts of the whole problem's ops: the turn runs `turns` times, and the ops after it are as much
        later."""
        whole, turns = self.period.table, self.period.turns
        starts = np.zeros(len(whole))
        for (pipeline, stage, kind), fifo in self.fifos.items():
            done = solver.value(fifo.done)
            for microbatch in range(whole.problem.pipelines[pipeline].microbatches):
                group, place = fifo.at(microbatch)
                if done <= group < done + turns:
                    start = solver.value(fifo.turn[place]) + (group - done) * self.length
                elif group < done:
                    start = solver.value(self.start[fifo.first + microbatch])
                else:
                    op = fifo.first + microbatch - turns * fifo.each
                    start = solver.value(self.start[op]) + (turns - 1) * self.length
                starts[whole.id(pipeline, stage, kind, microbatch)] = start
        return starts

    def _rank(self, rank: int, order: tuple[int, ...]) -> bool:
        """Add the variables of one rank: the ops before the turn, the turn within one length, and the ops after it;
        return False when a group lies on both sides."""
        model, length = self.model, self.length
        fixed = [op for op in order if op not in self.free]
        opening = max((self.early[op] + self.duration[op] for op in fixed if op in self.left), default=0)
        closing = min((self.late[op] for op in fixed if op not in self.left), default=self.end)
        if closing < opening:
            return False
        cut = model.new_int_var(opening, closing, "")
        intervals = []
        for op in fixed:
            self.start[op] = self.early[op] if op in self.left else self.late[op] + length
        for pipeline, p in enumerate(self.table.problem.pipelines):
            for stage, kind in itertools.product((s for s, r in enumerate(p.ranks) if r == rank), (0, 1)):
                if not self._lane(pipeline, stage, kind):
                    return False
                fifo = self.fifos[pipeline, stage, kind]
                for start in fifo.turn:
                    model.add(start >= cut)
                    model.add(start + fifo.duration <= cut + length)
                    intervals.append(model.new_fixed_size_interval_var(start, fifo.duration, ""))
                for start, later in itertools.pairwise(fifo.turn):
                    model.add(later >= start + fifo.duration)
        for op in (op for op in order if op in self.free):
            start = self.start[op] = model.new_int_var(opening, closing + length - self.duration[op], "")
            model.add_hint(start, self.early[op] + (0 if op in self.left else length))
            model.add(start + self.duration[op] <= cut).only_enforce_if(self.is_left[op])
            model.add(start >= cut + length).only_enforce_if(~self.is_left[op])
            intervals.append(model.new_fixed_size_interval_var(start, self.duration[op], ""))
        model.add_no_overlap(intervals)
        return True

    def _lane(self, pipeline: int, stage: int, kind: int) -> bool:
        """Add the groups of one stage and kind with the side of each; return False when a group would have to be on
        both sides."""
        p, each = self.table.problem.pipelines[pipeline], self.period.microbatches[pipeline]
        first = self.table.id(pipeline, stage, kind, 0)
        ids = range(first, first + p.microbatches)
        source = (pipeline, stage, 0) if kind else (pipeline, stage - 1, 0)
        if kind and stage + 1 < p.stages:
            source = (pipeline, stage + 1, 1)
        fifo = self.fifos[pipeline, stage, kind] = _Fifo(
            first=first,
            each=each,
            offset=sum(op in self.left for op in ids) % each,
            duration=self.duration[first],
            delay=self.delay[first],
            source=source if source[1] >= 0 else None,
            turn=[self.model.new_int_var(0, self.end + self.length, "") for _ in range(each)],
        )
        groups: dict[int, list[int]] = {}
        for op in ids:
            groups.setdefault(fifo.at(op - first)[0], []).append(op)
        sides, earlier = [], None
        for group in sorted(groups):
            known = {op in self.left for op in groups[group] if op not in self.free}
            if len(groups[group]) < each:
                known.add(group < 0)  # A turn follows whole groups.
            if len(known) == 2:
                return False
            side = self.model.new_constant(known.pop()) if known else self.model.new_bool_var("")
            if earlier is not None:
                self.model.add_implication(side, earlier)
            for op in groups[group]:
                self.is_left[op] = side
            sides.append(side)
            earlier = side
        fifo.done = min(groups) + sum(sides)
        return True

    def _precedences(self) -> None:
        """Require results before their consumers, in the shorter schedule and with any number of turns;
        keep micro-batches in order."""
        model, length = self.model, self.length
        for key, fifo in self.fifos.items():
            p = self.table.problem.pipelines[key[0]]
            for microbatch in range(1, p.microbatches):
                model.add(
                    self.start[fifo.first + microbatch] >= self.start[fifo.first + microbatch - 1] + fifo.duration
                )
            if fifo.source is None:
                continue
            source = self.fifos[fifo.source]
            lag = source.duration + fifo.delay
            for microbatch in range(fifo.each):
                (group, place), (of, at) = fifo.at(microbatch), source.at(microbatch)
                model.add(
                    fifo.turn[place] + (group - fifo.done) * length
                    >= source.turn[at] + (of - source.done) * length + lag
                )
            for microbatch in range(p.microbatches):
                op, origin = fifo.first + microbatch, source.first + microbatch
                if not self.free & {op, origin} and (op in self.left) == (origin in self.left):
                    continue
                (group, place), (of, at) = fifo.at(microbatch), source.at(microbatch)
                before, after = self.is_left[origin], self.is_left[op]
                model.add_implication(after, before)
                model.add(self.start[op] >= self.start[origin] + lag).only_enforce_if(after)
                model.add(self.start[op] >= self.start[origin] + lag).only_enforce_if(~before)
                model.add(fifo.turn[place] + (group - fifo.done) * length >= self.start[origin] + lag).only_enforce_if(
                    before, ~after
                )
                model.add(
                    self.start[op] - length >= source.turn[at] + (of - source.done) * length + lag
                ).only_enforce_if(before, ~after)

    def _limit(self, capacity: int) -> None:
        """Bound the memory of every rank with one turn put in: the other turns hold the same."""
        model, horizon = self.model, self.end + self.length
        by_rank: dict[int, tuple[list[cp_model.IntervalVar], list[int], int]] = {}
        for (pipeline, stage, kind), fifo in self.fifos.items():
            size = activation_ticks(self.table, self.scales, fifo.first)
            if kind == 1 or size == 0:
                continue
            p, back = self.table.problem.pipelines[pipeline], self.fifos[pipeline, stage, 1]
            intervals, sizes, room = by_rank.get(p.ranks[stage], ([], [], capacity))
            spans = [
                (self.start[fifo.first + m], self.start[back.first + m] + back.duration) for m in range(p.microbatches)
            ]
            # A forward of the turn holds until the end, and the room that its backwards free is taken until they end.
            spans += [(start, horizon) for start in fifo.turn]
            spans += [(0, start + back.duration) for start in back.turn]
            for opens, closes in spans:
                intervals.append(model.new_interval_var(opens, model.new_int_var(0, horizon, ""), closes, ""))
                sizes.append(size)
            by_rank[p.ranks[stage]] = intervals, sizes, room + size * fifo.each
        for intervals, sizes, room in by_rank.values():
            model.add_cumulative(intervals, sizes, room)
