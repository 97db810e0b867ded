"""Window search never loses the solution it was given."""

import numpy as np
import pytest
from checker import faults
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.solution import finish, trivial_bounds
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.windows import WindowSearch


def improved(table: OpTable, makespan: float, capacity: float):
    start = candidates(table, capacity)[0]
    goal = Goal(makespan, capacity, start, float("inf"), lambda solution: None)
    WindowSearch(table, 0).run(goal, 0.3, 0)
    assert goal.closest is not None
    return start, goal.closest


def test_a_published_instance_gets_shorter_within_its_capacity():
    table = OpTable(published(PUBLISHED[1]))
    start, found = improved(table, 372.0, 22.0)
    assert found.makespan < start.makespan
    assert found.peak <= 22.0
    assert faults(finish(table, found, trivial_bounds(table, found.makespan), 0.0, "windows")) == []


@pytest.mark.parametrize("seed", range(3))
def test_random_problems(seed):
    table = OpTable(random_problem(seed + 300))
    limit = table.problem.memory_limit
    start, found = improved(table, 0.0, np.inf if limit is None else limit)
    assert found.makespan <= start.makespan
    assert faults(finish(table, found, trivial_bounds(table, found.makespan), 0.0, "windows")) == []
