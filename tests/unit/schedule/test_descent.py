"""Goals, and how a walk ends."""

import pytest
from problems import PUBLISHED, published

from verl_fuse.schedule.descent import Attempt, Goal, descend
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.table import OpTable


class Interrupting(Attempt):
    def run(self, goal: Goal, effort: float, seed: int) -> None:
        raise KeyboardInterrupt


class Refuting(Attempt):
    def run(self, goal: Goal, effort: float, seed: int) -> None:
        goal.refute(goal.makespan + 1)


class RefutingMemory(Attempt):
    """Finds nothing, but proves that no less memory will do; `asked` is what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, goal: Goal, effort: float, seed: int) -> None:
        self.asked.append("makespan" if goal.makespan < goal.incumbent.makespan else "memory")
        if self.asked[-1] == "memory":
            goal.refute(goal.makespan + 1)


class Failing(Attempt):
    def run(self, goal: Goal, effort: float, seed: int) -> None:
        raise ZeroDivisionError


@pytest.fixture
def table() -> OpTable:
    return OpTable(published(PUBLISHED[1]))


def test_ctrl_c_returns_the_best_so_far(table):
    lines: list[str] = []
    solution, bounds = descend(table, Budget(30, report=lines.append), [Interrupting()])
    assert solution.key == candidates(table, float("inf"))[0].key
    assert bounds.makespan == 372.0
    assert lines == ["interrupted: returning the best schedule so far"]


def test_ctrl_c_in_the_part_that_hands_in_the_start_ends_all_of_it(table):
    """As the portfolio solves the shorter problem of a long one within `begin`."""
    budget, attempt = Budget(30), RefutingMemory()
    short = OpTable(published(PUBLISHED[2]))
    found = candidates(table, 16.0)[0]

    def begin():
        descend(short, budget.part(20), [Interrupting()])
        return found

    solution, _ = descend(table, budget, [attempt], begin)
    assert solution.key == min(found.key, candidates(table, float("inf"))[0].key)
    assert attempt.asked == []


def test_a_walk_goes_on_from_what_is_handed_in(table):
    shorter = candidates(table, float("inf"))[0]
    longest = candidates(table, float("inf"))[-1]
    assert descend(table, Budget(0), [Refuting()], lambda: longest)[0].key == shorter.key
    best = min(candidates(table, 16.0)[0], shorter, key=lambda s: s.key)
    assert descend(table, Budget(0), [Refuting()], lambda: best)[0].key == best.key


def test_bounds_rise_by_what_was_refuted_and_never_above_the_best(table):
    solution, bounds = descend(table, Budget(30), [Refuting()])
    assert bounds.makespan == solution.makespan > 372.0
    assert bounds.memory == solution.peak


def test_time_that_memory_leaves_is_the_makespans(table):
    attempt = RefutingMemory()
    solution, bounds = descend(table, Budget(2), [attempt])
    assert attempt.asked[0] == attempt.asked[-1] == "makespan"
    assert "memory" in attempt.asked
    assert solution.makespan > bounds.makespan == 372.0
    assert bounds.memory == solution.peak


def test_no_time_still_gives_a_schedule(table):
    solution, bounds = descend(table, Budget(0), [Refuting()])
    assert solution.makespan > bounds.makespan == 372.0


def test_a_fault_in_an_attempt_is_not_swallowed(table):
    with pytest.raises(ZeroDivisionError):
        descend(table, Budget(5), [Failing()])


def test_a_goal_keeps_the_closest_within_its_capacity(table):
    small, large = candidates(table, 16.0)[0], candidates(table, float("inf"))[0]
    goal = Goal(372.0, 16.0, large, float("inf"), lambda solution: None)
    goal.offer(large)
    assert goal.closest is None
    goal.offer(small)
    assert goal.closest is small
    assert not goal.over
    goal.stop()
    assert goal.over
