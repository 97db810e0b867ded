"""The bounds equal the published ones, and hold against brute force on tiny problems of every kind."""

import pytest
from brute_force import pareto
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.bounds import makespan_bound, memory_bound
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import Pipeline, ScheduleProblem


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"instance{row['id']}")
def test_published_lower_bounds(row):
    assert makespan_bound(OpTable(published(row))) == row["lower_bound"]


@pytest.mark.parametrize("seed", range(100, 160))
def test_no_schedule_beats_the_bounds(seed):
    problem = random_problem(seed, ranks=2, pipelines=2, microbatches=2)
    table = OpTable(problem)
    for makespan, peak in pareto(problem):
        assert makespan_bound(table) <= makespan + 1e-9
        assert memory_bound(table, makespan) <= peak + 1e-9


def test_a_deadline_forces_memory():
    """Eight stages of the same cost hold eight micro-batches to end in the least time (instance 2), and
    one when nothing hurries."""
    table = OpTable(published(PUBLISHED[2]))
    assert memory_bound(table, 225.0) == 15.6
    assert memory_bound(table, 5000.0) == 2.0


def test_a_memory_limit_forces_time():
    """One micro-batch at a time through two stages: six ticks each."""
    actor = Pipeline("actor", (0, 1), 3, 1, 2, 1)
    assert makespan_bound(OpTable(ScheduleProblem(2, (actor,)))) == 12.0
    assert makespan_bound(OpTable(ScheduleProblem(2, (actor,), 1.0))) == 18.0


@pytest.mark.parametrize("activation", [1.0, 0.1, 0.7, 2.3])
@pytest.mark.parametrize(("held", "makespan"), [(1, 36.0), (2, 21.0), (3, 18.0)])
def test_a_limit_that_is_a_multiple_of_an_activation_lets_so_many_be_held(activation, held, makespan):
    """1F1B of four micro-batches on three stages; 0.3 / 0.1 is less than 3 in floating point."""
    limit = float(f"{held * activation:.1f}")
    problem = ScheduleProblem(3, (Pipeline("actor", (0, 1, 2), 4, 1, 2, activation),), limit)
    assert makespan_bound(OpTable(problem)) == makespan
    schedule = solve(problem, "greedy", Budget(5.0))
    assert (schedule.makespan, schedule.optimal) == (makespan, True)
    fewer = ScheduleProblem(3, problem.pipelines, max(activation, limit - activation / 4))
    assert makespan_bound(OpTable(fewer)) == {1: 36.0, 2: 36.0, 3: 21.0}[held]
