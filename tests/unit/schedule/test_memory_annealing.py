"""Annealed memory: the deadline is kept, the energy is true, one seed gives one result."""

import numpy as np
import pytest
from checker import faults
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule import memory_kernel, swap_kernel
from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.memory_annealing import MemoryAnnealing
from verl_fuse.schedule.solution import Solution, finish, trivial_bounds
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales

FOREVER = float("inf")


def fast_and_fat(table: OpTable) -> Solution:
    return min(candidates(table, FOREVER), key=lambda solution: solution.makespan)


def slimmed(table: OpTable, capacity: float) -> tuple[Solution, Solution]:
    start = fast_and_fat(table)
    goal = Goal(start.makespan, capacity, start, FOREVER, lambda solution: None)
    MemoryAnnealing(table, 0).run(goal, 0.5, 1)
    return start, goal.incumbent


def test_memory_falls_at_the_same_makespan_and_one_seed_gives_one_result():
    table = OpTable(published(PUBLISHED[1]))
    start, found = slimmed(table, 15.6)
    assert found.makespan <= start.makespan
    assert found.peak < 0.7 * start.peak
    assert slimmed(table, 15.6)[1].orders == found.orders
    assert faults(finish(table, found, trivial_bounds(table, found.makespan), 0.0, "slim")) == []


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    table = OpTable(random_problem(seed + 70))
    start, found = slimmed(table, table.problem.least_memory_limit)
    assert found.makespan <= start.makespan
    assert found.peak <= start.peak


def test_deadline_and_energy_hold_after_many_swaps():
    table = OpTable(published(PUBLISHED[2]))
    graph, start = swap_kernel.graph_of(table, scales(table)), fast_and_fat(table)
    order = swap_kernel.order_of(graph, start.orders)
    deadline, capacity = int(start.makespan), scales(table).memory.floor(10.0)
    energy, best_previous = memory_kernel.energy_of(order, capacity), order.previous.copy()
    for seed in range(5):
        now, best = memory_kernel.anneal_memory(
            graph, order, seed, 5000, 1e5, 1e3, deadline, capacity, energy, energy, best_previous
        )
        assert swap_kernel.end_of(graph, order) <= deadline
        assert now == memory_kernel.energy_of(order, capacity)
        assert best == memory_kernel.energy_of(
            swap_kernel.order_of(graph, swap_kernel.orders_from(table, best_previous)), capacity
        )
        energy = min(now, best)
        order = swap_kernel.order_of(graph, swap_kernel.orders_from(table, best_previous)) if best < now else order


def test_a_slow_incumbent_is_left_alone():
    table = OpTable(published(PUBLISHED[2]))
    goal = Goal(225.0, 15.6, fast_and_fat(table), FOREVER, lambda solution: pytest.fail("offered"))
    assert goal.incumbent.makespan > 225.0
    MemoryAnnealing(table, 0).run(goal, 0.1, 0)
    assert np.isfinite(goal.incumbent.peak)
