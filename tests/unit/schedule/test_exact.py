"""The exact method and the portfolio agree with brute force on tiny problems, and prove their claims."""

import pytest
from brute_force import pareto
from problems import PUBLISHED, published, random_problem

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget


@pytest.mark.parametrize("method", ["exact", "portfolio"])
@pytest.mark.parametrize("seed", range(200, 205))
def test_brute_force_agrees(method, seed):
    problem = random_problem(seed, ranks=2, pipelines=2, microbatches=2)
    schedule, (makespan, peak) = solve(problem, method, Budget(4)), pareto(problem)[0]
    assert schedule.makespan == pytest.approx(makespan)
    assert schedule.peak_memory == pytest.approx(peak)


def test_instance_2_is_proven_optimal_in_time_and_memory():
    schedule = solve(published(PUBLISHED[2]), "portfolio", Budget(60))
    assert (schedule.makespan, schedule.optimal) == (225.0, True)
    assert (schedule.peak_memory, schedule.memory_optimal) == (15.6, True)
