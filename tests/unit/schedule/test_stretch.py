"""Turns put into a short schedule."""

import time

import pytest
from checker import faults
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.in_flight import InFlightSearch
from verl_fuse.schedule.period import Period, period_of
from verl_fuse.schedule.solution import Solution, finish, trivial_bounds
from verl_fuse.schedule.stretch import stretch
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

FOREVER = float("inf")


@pytest.fixture
def period() -> Period:
    """Of instance 0: two micro-batches of the actor a turn, one of each of two copies of the critic."""
    found = period_of(OpTable(published(PUBLISHED[0])))
    assert found is not None
    return found


def at_the_bound(period: Period, capacity: float) -> Solution:
    """A schedule of the shorter problem that reaches its bound."""
    table = period.short
    bound = trivial_bounds(table, FOREVER).makespan
    goal = Goal(bound, capacity, candidates(table, FOREVER)[0], FOREVER, lambda solution: None)
    for seed in range(20):
        if not goal.over:
            InFlightSearch(table, 0).run(goal, 2.0, seed)
    assert goal.reached
    return goal.incumbent


def stretched(period: Period, solution: Solution, capacity: float) -> Solution | None:
    return stretch(period, solution, capacity, 0, time.monotonic() + 60)


def check(period: Period, short: Solution) -> None:
    """Check the promise: a schedule of the whole problem, a turn's length later for every turn, with no more memory."""
    solution = stretched(period, short, short.peak)
    assert solution is not None
    assert solution.makespan == pytest.approx(short.makespan + period.turns * period.length)
    assert solution.peak <= short.peak
    assert faults(finish(period.table, solution, trivial_bounds(period.table, solution.makespan), 0.0, "x")) == []


def test_a_published_instance_from_half_of_it(period):
    check(period, at_the_bound(period, 30.0))
    assert period.short.problem.pipelines[0].microbatches < PUBLISHED[0]["m0"]


def test_no_rank_has_time_to_spare():
    """Six ranks, of which one is busy from its first op to its last: nothing may come late after any turn."""
    actor, critic = Pipeline("actor", range(6), 40, 2, 4, 1.64), Pipeline("critic", range(5, -1, -1), 40, 1, 2, 1)
    period = period_of(OpTable(ScheduleProblem(6, (actor, critic))))
    assert period is not None
    check(period, at_the_bound(period, 14.0))


def test_transfers_and_uneven_stages():
    pipelines = (
        Pipeline("actor", (0, 1, 2), 40, (1, 2, 1.5), (2, 3.5, 3), (1, 0.5, 1)),
        Pipeline("critic", (2, 1, 0), 21, (0.5, 1, 1), (1, 2, 1), (2, 1, 0.25)),
    )
    period = period_of(OpTable(ScheduleProblem(3, pipelines, transfer=0.5)))
    assert period is not None
    assert period.microbatches == (2, 1)
    check(period, candidates(period.short, FOREVER)[0])


def test_no_room_for_a_turn_in_too_little_memory(period):
    short = at_the_bound(period, 30.0)
    assert stretch(period, short, 4.0, 0, time.monotonic() + 2) is None


def test_no_time_no_result(period):
    assert stretch(period, candidates(period.short, FOREVER)[0], FOREVER, 0, time.monotonic()) is None


def test_random_problems():
    """Greedy schedules of random problems, with whole, decimal and irregular numbers: whatever comes out is a
    schedule within the capacity."""
    found = 0
    for seed in (*range(44), *range(48, 60)):  # the others find nothing, slowly
        table = OpTable(random_problem(seed, microbatches=24))
        period = period_of(table)
        if period is None:
            continue
        limit = table.problem.memory_limit
        short = candidates(period.short, FOREVER if limit is None else limit)[0]
        solution = stretched(period, short, short.peak)
        if solution is None:
            continue
        found += 1
        assert solution.makespan == pytest.approx(short.makespan + period.turns * period.length, rel=1e-6)
        assert solution.peak <= short.peak * (1 + 1e-9)
        assert faults(finish(table, solution, trivial_bounds(table, solution.makespan), 0.0, "x")) == []
    assert found >= 30
