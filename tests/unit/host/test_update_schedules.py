"""Schedules from measured updates; shows the invariants in the docstring of plugins/verl_fuse_pipeline/schedules.py."""

import logging
from dataclasses import replace

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse_pipeline.report import ModelCost, RankReport
from verl_fuse_pipeline.schedules import UpdateSchedules, problem

PLACEMENTS = {"actor": ((0, 1),), "critic": ((1, 0),)}


def update(forward=1.0, counts=((4, 4),), headroom=None, activation=None, ranks=(0, 1)):
    """One report per rank; a backward takes twice the forward, the critic half as long as the actor."""
    costs = {
        "actor": ModelCost(forward, 2 * forward, activation),
        "critic": ModelCost(forward / 2, forward, activation),
    }
    return [RankReport(rank, PLACEMENTS, costs, counts, 0, headroom, ()) for rank in ranks]


def greedy(problem: ScheduleProblem):
    return solve(problem, "greedy", Budget(5.0))


def test_a_problem_is_what_was_measured_in_seconds():
    assert problem((4, 2), [update()], {}) == ScheduleProblem(
        2, (Pipeline("actor", (0, 1), 4, 1.0, 2.0, 1.0), Pipeline("critic", (1, 0), 2, 0.5, 1.0, 1.0))
    )


def test_medians_over_updates_and_processes_are_rounded_to_two_digits():
    updates = [update(0.10011), update(0.10419), update(5.0)]
    assert problem((4, 4), updates, {}).pipelines[0].forward == (0.10, 0.10)
    # Two processes of a tensor-parallel group play one rank.
    assert problem((4, 4), [update(ranks=(0, 0, 1, 1))], {}) == problem((4, 4), [update()], {})


def test_memory_is_limited_where_every_rank_has_measured_it():
    activations = {(model, rank): 70.0 for model in PLACEMENTS for rank in (0, 1)}
    limited = problem((4, 4), [update(headroom=1000)], activations)
    assert (limited.memory_limit, limited.pipelines[0].activation) == (900.0, (70.0, 70.0))
    assert problem((4, 4), [update(headroom=10)], activations).memory_limit == 70.0
    uneven = {**activations, ("critic", 1): 20.0, ("actor", 0): 90.0}
    limited = problem((4, 4), [update(headroom=10)], uneven)
    assert (limited.memory_limit, limited.pipelines[0].activation) == (90.0, (90.0, 70.0))
    assert limited.pipelines[1].activation == (20.0, 70.0)
    assert problem((4, 4), [update(headroom=1000)], {("actor", 0): 70.0}).memory_limit is None
    assert problem((4, 4), [update()], activations).memory_limit is None


@pytest.mark.parametrize("headrooms", [(500, 1000, 2000), (1000, 500, 2000), (2000, 1000, 500)])
def test_the_limit_of_all_ranks_is_that_of_the_rank_with_the_least_room(headrooms):
    activations = {(model, rank): 70.0 for model in PLACEMENTS for rank in (0, 1)}
    processes = [update(headroom=headroom, ranks=(rank,)) for rank, headroom in zip((0, 0, 1), headrooms, strict=True)]
    of_all = [report for found in processes for report in found]
    assert problem((4, 4), [of_all], activations).memory_limit == 450.0
    assert problem((4, 4), [of_all, update(headroom=100)], activations).memory_limit == 90.0
    assert problem((4, 4), [[*of_all, *update(ranks=(1,))]], activations).memory_limit is None


def test_activations_measured_once_are_kept():
    asked = []
    schedules = UpdateSchedules(lambda problem: asked.append(problem) or greedy(problem))
    schedules.learn(update(1.0, headroom=1000, activation=70.0))
    schedules.wait()
    for _ in range(4):
        schedules.learn(update(3.0, headroom=1000))
        schedules.wait()
    assert [found.memory_limit for found in asked] == [900.0] * len(asked)
    assert len(asked) > 1


def test_the_first_update_has_no_schedule_and_the_next_has_those_of_all_fused_calls():
    schedules = UpdateSchedules(greedy)
    assert schedules.ready() == {}
    schedules.learn(update(counts=((4, 4), (4, 2), (4, 0))))
    schedules.wait()
    assert set(schedules.ready()) == {(4, 4), (4, 2)}


@pytest.mark.parametrize(("seconds", "solved"), [([1.0, 1.0, 1.05], 1), ([1.0, 1.0, 9.0], 1), ([1.0, 2.0, 2.0], 3)])
def test_a_schedule_stays_until_costs_have_drifted(seconds, solved):
    schedules = UpdateSchedules(greedy)
    for forward in seconds:
        schedules.learn(update(forward))
        schedules.wait()
        assert set(schedules.ready()) == {(4, 4)}
    assert schedules.solved == solved


def test_a_backward_that_has_drifted_is_solved_anew():
    schedules = UpdateSchedules(greedy)
    for backward in (2.0, 3.0, 3.0):
        reports = [replace(r, costs={m: replace(c, backward=backward) for m, c in r.costs.items()}) for r in update()]
        schedules.learn(reports)
        schedules.wait()
    assert schedules.solved > 1


def test_a_schedule_that_no_longer_pays_is_left():
    pays = True
    schedules = UpdateSchedules(lambda problem: greedy(problem) if pays else None)
    schedules.learn(update(1.0))
    schedules.wait()
    assert set(schedules.ready()) == {(4, 4)}
    pays = False
    schedules.learn(update(9.0))
    schedules.wait()
    assert schedules.ready() == {}


def test_the_largest_activation_that_was_measured_counts():
    asked = []
    schedules = UpdateSchedules(lambda problem: asked.append(problem) or greedy(problem))
    for forward, activation in ((1.0, 70.0), (9.0, 20.0), (9.0, 20.0)):
        schedules.learn(update(forward, headroom=1000, activation=activation))
        schedules.wait()
    assert len(asked) > 1
    assert {found.pipelines[0].activation for found in asked} == {(70.0, 70.0)}


def test_where_nothing_is_faster_there_is_no_schedule_and_that_is_said_once(caplog):
    schedules = UpdateSchedules(lambda problem: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            schedules.learn(update())
            schedules.wait()
    assert schedules.ready() == {}
    assert [record.message for record in caplog.records] == [
        (
            "4 actor and 4 critic micro-batches run one model after the other: no fused schedule is "
            "predicted to be faster"
        )
    ]


def test_what_a_solver_raises_ends_the_run():
    def broken(problem):
        raise ValueError("no")

    schedules = UpdateSchedules(broken)
    schedules.learn(update())
    schedules.wait()
    with pytest.raises(FuseError, match="could not be solved: no"):
        schedules.ready()
