"""Limits on micro-batches in flight, and the schedules that CP-SAT finds under them."""

import pytest
from checker import faults
from problems import PUBLISHED, published, random_problem, two_ranks

from verl_fuse.schedule.bounds import makespan_bound
from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.in_flight import InFlightSearch, limits
from verl_fuse.schedule.solution import finish, trivial_bounds
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

FOREVER = float("inf")


def test_room_goes_to_the_larger_share():
    """Two stages, six micro-batches of 1 unit: 1F1B needs 2 + 1 on rank 0 and 1 + 2 on rank 1;
    three units more are shared."""
    table = OpTable(two_ranks(6))
    even = limits(table, 6.0, {"actor": 1.0, "critic": 1.0})
    assert [even[0, 0] + even[1, 1], even[0, 1] + even[1, 0]] == [6, 6]
    assert limits(table, 6.0, {"actor": 4.0, "critic": 1.0}) == {(0, 0): 5, (1, 1): 1, (0, 1): 4, (1, 0): 2}
    assert limits(table, 100.0, {"actor": 4.0, "critic": 1.0}) == dict.fromkeys(even, 6)


def test_where_one_f_one_b_does_not_fit_all_are_cut_down_to_one():
    table = OpTable(two_ranks(6))
    assert limits(table, 2.0, {"actor": 1.0, "critic": 4.0}) == {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 1}
    assert limits(table, 0.5, {"actor": 1.0, "critic": 4.0}) == {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 1}


def test_limits_raise_the_bound():
    """One micro-batch at a time through two stages, as under a memory limit of one."""
    table = OpTable(ScheduleProblem(2, (Pipeline("actor", (0, 1), 3, 1, 2, 1),)))
    assert makespan_bound(table) == 12.0
    assert makespan_bound(table, {(0, 0): 1, (0, 1): 1}) == 18.0


@pytest.mark.parametrize("capacity", [FOREVER, 22.0])
def test_the_bound_is_reached_within_the_capacity(capacity):
    table = OpTable(published(PUBLISHED[1]))
    goal = Goal(372.0, capacity, candidates(table, capacity)[0], FOREVER, lambda solution: None)
    for seed in range(6):
        InFlightSearch(table, 0).run(goal, 1.0, seed)
    assert goal.reached
    assert goal.incumbent.peak <= capacity
    assert goal.refuted_below is None
    assert faults(finish(table, goal.incumbent, trivial_bounds(table, 372.0), 0.0, "limited")) == []


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    table = OpTable(random_problem(seed + 40))
    limit = table.problem.memory_limit
    start = candidates(table, FOREVER if limit is None else limit)[0]
    goal = Goal(start.makespan, FOREVER if limit is None else limit, start, FOREVER, lambda solution: None)
    InFlightSearch(table, 0).run(goal, 0.2, seed)
    assert faults(finish(table, goal.incumbent, trivial_bounds(table, start.makespan), 0.0, "limited")) == []
