"""The bounds equal the published ones, and hold against brute force on tiny problems of every kind."""

import pytest
from brute_force import pareto
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.bounds import heads, makespan_bound, memory_bound, tails
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


def test_a_memory_limit_delays_every_start_and_every_end():
    """Three micro-batches through two stages, one at a time."""
    table = OpTable(ScheduleProblem(2, (Pipeline("actor", (0, 1), 3, 1, 2, 1),), 1.0))
    of_stages = [
        (heads(table)[table.id(0, s, 0, m)], tails(table)[table.id(0, s, 1, m)]) for s in (0, 1) for m in range(3)
    ]
    assert of_stages == [(0, 12), (6, 6), (12, 0), (1, 14), (7, 8), (13, 2)]


def test_activations_that_stay_for_long_need_memory_on_average():
    """A forward's activation stays until its backward: eight times six, or with transfers eight, in 27 or 29."""
    actor = Pipeline("actor", (0, 1), 8, 1, 2, 1)
    assert memory_bound(OpTable(ScheduleProblem(2, (actor,))), 27.0) == pytest.approx(48 / 27)
    assert memory_bound(OpTable(ScheduleProblem(2, (actor,), None, 1.0)), 29.0) == pytest.approx(64 / 29)
    # The stage in the middle begins one tick late, and ends two before the last backward does.
    middle = Pipeline("actor", (0, 1, 2), 6, 1, 2, (1, 10, 1))
    assert memory_bound(OpTable(ScheduleProblem(3, (middle,))), 24.0) == pytest.approx(10 * 36 / 21)


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
