"""The compiled loop against the plain timing, and reproducibility."""

import pytest
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.makespan_annealing import MakespanAnnealing
from verl_fuse.schedule.solution import Solution, from_orders
from verl_fuse.schedule.table import OpTable

FOREVER = float("inf")


def annealed(table: OpTable, makespan: float, capacity: float, seed: int) -> Solution:
    goal = Goal(makespan, capacity, candidates(table, capacity)[0], FOREVER, lambda solution: None)
    MakespanAnnealing(table, 0).run(goal, 0.2, seed)
    assert goal.closest is not None
    return goal.closest


@pytest.mark.parametrize("seed", range(3))
def test_re_timing_what_changed_equals_timing_everything(seed):
    """The makespan that the loop reports equals that of a fresh timing of its orders."""
    table = OpTable(random_problem(seed + 900, ranks=3, pipelines=3, microbatches=6))
    start = candidates(table, FOREVER)[-1]
    found = annealed(table, 0.0, FOREVER, seed)
    again = from_orders(table, found.orders)
    assert again is not None
    assert again.makespan == found.makespan <= start.makespan


def test_one_seed_gives_one_result_within_the_capacity():
    table = OpTable(published(PUBLISHED[1]))
    first, second = (annealed(table, 372.0, 21.0, 3) for _ in range(2))
    assert first.orders == second.orders
    assert first.peak <= 21.0
    assert first.makespan < candidates(table, 21.0)[0].makespan
