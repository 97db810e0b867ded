"""The invariants in the docstring of verl_fuse/runtime/lower.py."""

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.runtime.lower import lower, lower_schedule
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import parse_text

REVERSED_CRITIC = ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2, 1), Pipeline("critic", (1, 0), 1, 1, 2, 1)))


def test_receives_stand_before_and_sends_behind_their_ops():
    orders = parse_text("0F0 1F0 1B0 0B0\n1F0 0F0 0B0 1B0\n")
    assert lower(REVERSED_CRITIC, orders).to_text() == (
        "0F0 0F0>1 1F0<1 1F0 1B0 1B0>1 0B0<1 0B0\n1F0 1F0>0 0F0<0 0F0 0B0 0B0>0 1B0<0 1B0\n"
    )


def test_a_stage_in_the_middle_receives_and_sends_both_ways():
    problem = ScheduleProblem(4, (Pipeline("actor", (2, 0, 3), 1, 1, 2, 1),))
    assert lower(problem, parse_text("0F0 0B0\n\n0F0 0B0\n0F0 0B0\n")).to_text() == (
        "0F0<2 0F0 0F0>3 0B0<3 0B0 0B0>2\n\n0F0 0F0>0 0B0<0 0B0\n0F0<0 0F0 0B0 0B0>0\n"
    )


def test_a_pipeline_within_one_rank_sends_nothing():
    problem = ScheduleProblem(1, (Pipeline("critic", (0,), 2, 1, 2, 1),))
    assert lower(problem, parse_text("0F0 0B0 0F1 0B1")).to_text() == "0F0 0B0 0F1 0B1\n"


def test_a_schedule_is_lowered_in_the_order_of_its_rows():
    schedule = solve(REVERSED_CRITIC, "greedy", Budget(1.0))
    program = lower_schedule(schedule)
    runs = [" ".join(step.token for step in row if step.action == "run") for row in program.rows]
    assert runs == schedule.to_text().splitlines()


@pytest.mark.parametrize("text", ["0F0\n2F0\n", "0F0\n0F0\n0F0\n"])
def test_an_op_of_no_stage_is_refused(text: str):
    with pytest.raises(FuseError, match="the problem has no such stage there"):
        lower(REVERSED_CRITIC, parse_text(text))
