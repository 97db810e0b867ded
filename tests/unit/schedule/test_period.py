"""Turns of the steady state, and the problems whose bound stays in step without some turns."""

import pytest
from problems import PUBLISHED, published, random_problem, two_ranks

from verl_fuse.schedule.bounds import makespan_bound
from verl_fuse.schedule.period import MOST_OPS_SHARE, period_of
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import Pipeline, ScheduleProblem


@pytest.mark.parametrize(
    ("instance", "each", "length"),
    [(0, (2, 1, 1), 42.0), (3, (1, 1), 21.0), (6, (2, 1, 1), 18.0), (9, (1, 1), 9.0), (10, (1, 1), 9.0)],
)
def test_the_bound_falls_by_the_turns_taken_out(instance, each, length):
    table = OpTable(published(PUBLISHED[instance]))
    period = period_of(table)
    assert period is not None
    assert (period.microbatches, period.length) == (each, length)
    assert makespan_bound(period.short) + period.turns * length == PUBLISHED[instance]["lower_bound"]
    assert len(period.short) <= MOST_OPS_SHARE * len(table)


@pytest.mark.parametrize("instance", [2, 5, 8, 11])
def test_nothing_to_spare_where_the_bound_is_that_of_one_pipeline(instance):
    assert period_of(OpTable(published(PUBLISHED[instance]))) is None


def test_the_shorter_problem_keeps_everything_but_micro_batches():
    pipelines = (
        Pipeline("actor", (0, 1), 64, (1, 2), (2, 3), (1, 0.5)),
        Pipeline("critic", (1, 0), 30, (0.5, 1), (1, 2), (2, 1)),
    )
    problem = ScheduleProblem(2, pipelines, memory_limit=9.0, transfer=0.25)
    period = period_of(OpTable(problem))
    assert period is not None
    assert period.microbatches == (2, 1)
    assert period.length == 11.5
    short = period.short.problem
    assert (short.ranks, short.memory_limit, short.transfer) == (2, 9.0, 0.25)
    for before, after, each in zip(pipelines, short.pipelines, (2, 1), strict=True):
        assert after.microbatches == before.microbatches - each * period.turns > 0
        assert (after.ranks, after.forward, after.backward, after.activation) == (
            before.ranks,
            before.forward,
            before.backward,
            before.activation,
        )


def test_enough_is_kept_to_warm_up():
    period = period_of(OpTable(ScheduleProblem(6, (Pipeline("actor", range(6), 40, 1, 2, 1),))))
    assert period is not None
    assert period.short.problem.pipelines[0].microbatches >= 6


def test_one_micro_batch_is_never_taken_out():
    assert period_of(OpTable(two_ranks(1))) is None
    assert (
        period_of(
            OpTable(
                ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2, 1), Pipeline("critic", (1, 0), 40, 1, 2, 1)))
            )
        )
        is None
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_fall_in_step_or_have_no_period(seed):
    table = OpTable(random_problem(seed, microbatches=24))
    period = period_of(table)
    if period is not None:
        bound = makespan_bound(table)
        assert makespan_bound(period.short) + period.turns * period.length == pytest.approx(bound)
