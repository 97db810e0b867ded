"""Every method, on published, hand-made and random problems, judged by the independent checker."""

import pytest
from brute_force import pareto
from checker import faults
from problems import PUBLISHED, published, random_problem, two_ranks

from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import METHODS, solve
from verl_fuse.schedule.solution import Budget

SECONDS = 0.15


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("row", [PUBLISHED[2], PUBLISHED[5]], ids=lambda row: f"instance{row['id']}")
def test_published(method, row):
    schedule = solve(published(row), method, Budget(SECONDS))
    assert faults(schedule) == []
    assert schedule.lower_bound == row["lower_bound"]


@pytest.mark.parametrize("row", [PUBLISHED[11]], ids=lambda row: f"instance{row['id']}")
def test_memory_limit_of_serial_training(method, row):
    schedule = solve(published(row, row["mem_serial_1f1b"]), method, Budget(SECONDS))
    assert faults(schedule) == []
    assert schedule.peak_memory <= row["mem_serial_1f1b"] + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_random(method, seed):
    assert faults(solve(random_problem(seed), method, Budget(SECONDS))) == []


@pytest.mark.parametrize("method", ["serial", "back-to-back", "greedy"])
def test_500_random_problems(method):
    """The methods that need no time; ci/bench/schedule.py --random 500 does the same with the portfolio."""
    for seed in range(500):
        assert (seed, faults(solve(random_problem(seed), method, Budget(SECONDS)))) == (seed, [])


@pytest.mark.parametrize(("limit", "transfer"), [(None, 1.0), (2.0, 0.0), (1.0, 1.0)])
def test_least_memory_and_transfers(method, limit, transfer):
    assert faults(solve(two_ranks(3, limit, transfer), method, Budget(SECONDS))) == []


@pytest.mark.parametrize("seed", range(4))
def test_never_beats_brute_force(method, seed):
    problem = random_problem(seed, ranks=2, pipelines=2, microbatches=2)
    front = pareto(problem)
    schedule = solve(problem, method, Budget(SECONDS))
    assert schedule.makespan >= front[0][0] - 1e-9
    assert schedule.lower_bound <= front[0][0] + 1e-9
    assert (
        schedule.memory_lower_bound
        <= min(peak for makespan, peak in front if makespan <= schedule.makespan + 1e-9) + 1e-9
    )


def test_unknown_method_names_the_choices():
    with pytest.raises(FuseError, match=r"method='magic'; allowed: serial, back-to-back, greedy"):
        solve(two_ranks(), "magic", Budget(1))
