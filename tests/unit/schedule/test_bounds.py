"""The bounds equal the published ones, and hold against brute force on tiny problems of every kind."""

import pytest
from brute_force import pareto
from problems import PUBLISHED, published, random_problem, two_ranks

from verl_fuse.schedule.bounds import makespan_bound, memory_bound
from verl_fuse.schedule.table import OpTable


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
    table = OpTable(two_ranks(2))
    assert makespan_bound(table) == 12.0
    assert [memory_bound(table, deadline) for deadline in (13.0, 24.0)] == [1.0, 1.0]


def test_a_memory_limit_forces_time():
    free, tight = (makespan_bound(OpTable(two_ranks(3, limit))) for limit in (None, 1.0))
    assert free < tight
