"""The invariants in the docstring of verl_fuse/runtime/check.py."""

import random

import pytest
from toy import random_orders, random_problem

from verl_fuse.errors import FuseError
from verl_fuse.runtime.check import check, predicted_peaks
from verl_fuse.runtime.lower import lower, lower_schedule
from verl_fuse.runtime.program import PipelineProgram
from verl_fuse.schedule.methods import METHODS, solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import parse_text

ONE_RANK = ScheduleProblem(1, (Pipeline("actor", (0,), 2, 1, 2, 1),))
TWO_RANKS = ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2, 1), Pipeline("critic", (1, 0), 1, 1, 2, 1)))


def refusal(problem: ScheduleProblem, text: str) -> str:
    with pytest.raises(FuseError) as caught:
        check(PipelineProgram.from_text(problem, text))
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_solved_schedule_passes(method: str):
    critics = (Pipeline("critic", (1, 0), 4, 1, 2, 1), Pipeline("critic", (3, 2), 4, 1, 2, 1))
    schedule = solve(ScheduleProblem(4, (Pipeline("actor", range(4), 8, 1, 2, 1.5), *critics)), method, Budget(0.3))
    program = lower_schedule(schedule)
    check(program)
    assert max(predicted_peaks(program)) == schedule.peak_memory


def test_random_orders_that_run_pass_and_shuffled_ones_do_not_all():
    refused = 0
    for seed in range(100):
        draw = random.Random(seed)
        problem = random_problem(draw)
        orders = random_orders(problem, draw)
        check(lower(problem, orders))
        for row in orders:
            draw.shuffle(row)
        try:
            check(lower(problem, orders))
        except FuseError:
            refused += 1
    assert refused > 80


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("0F0 0F1 0B0", "the end of rank 0: 0B1 is missing\n  rank 0: 0F0 0F1 0B0 [end]"),
        ("0F0 0F0 0F1 0B0 0B1", "0F0 on rank 0 comes where 0F1 is due\n  rank 0: 0F0 [0F0] 0F1 0B0 0B1"),
        ("0F0 0F1 0F2 0B0 0B1", "0F2 on rank 0 is not part of the problem\n  rank 0: 0F0 0F1 [0F2] 0B0 0B1"),
        ("1F0", "1F0 on rank 0 is not part of the problem\n  rank 0: [1F0]"),
        ("0F1 0F0 0B0 0B1", "0F1 on rank 0 comes where 0F0 is due\n  rank 0: [0F1] 0F0 0B0 0B1"),
        ("0F0 0F1 0B1 0B0", "0B1 on rank 0 comes where 0B0 is due\n  rank 0: 0F0 0F1 [0B1] 0B0"),
        ("0F0 0B0 0B1 0F1", "0B1 on rank 0 comes before its forward\n  rank 0: 0F0 0B0 [0B1] 0F1"),
        ("0F0 0F0>0 0F1 0B0 0B1", "0F0>0 on rank 0 comes where 0F1 is due\n  rank 0: 0F0 [0F0>0] 0F1 0B0 0B1"),
    ],
)
def test_a_row_that_is_not_the_rank_s_work_is_refused(row: str, fault: str):
    assert refusal(ONE_RANK, row) == f"program: {fault}"


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ("0F0 0F0>1 ", "0F0 ", "1F0<1 on rank 0 comes where 0F0>1 is due"),
        ("0F0 0F0>1 ", "0F0>1 0F0 ", "0F0>1 on rank 0 comes where 0F0 is due"),
        ("0F0 0F0>1 ", "0F0 0F0>0 ", "0F0>0 on rank 0 comes where 0F0>1 is due"),
        ("0B0<1 0B0\n", "0B0 0B0<1\n", "0B0 on rank 0 comes where 0B0<1 is due"),
        ("0B0<1 0B0\n", "0B0<1 0B0 0F0<0\n", "0F0<0 on rank 0 comes where the end is due"),
        ("1B0<0 1B0\n", "", "rows; its problem has 2 ranks"),
    ],
)
def test_messages_that_are_not_those_of_the_ops_are_refused(good: str, bad: str, fault: str):
    text = lower(TWO_RANKS, parse_text("0F0 1F0 1B0 0B0\n1F0 0F0 0B0 1B0\n")).to_text()
    check(PipelineProgram.from_text(TWO_RANKS, text))
    lines = text.replace(good, bad, 1) if bad else text.splitlines()[0]
    assert fault in refusal(TWO_RANKS, lines)


def test_a_deadlock_names_the_ring_and_marks_where_each_rank_waits():
    with pytest.raises(FuseError) as caught:
        check(lower(TWO_RANKS, parse_text("1F0 0F0 0B0 1B0\n0F0 1F0 1B0 0B0\n")))
    assert str(caught.value) == (
        "program deadlocks: rank 0 waits at 1F0<1, rank 1 waits at 0F0<0\n"
        "  rank 0: [1F0<1] 1F0 0F0 0F0>1 0B0<1 0B0 1B0 1B0>1\n"
        "  rank 1: [0F0<0] 0F0 1F0 1F0>0 1B0<0 1B0 0B0 0B0>0"
    )


def test_the_memory_limit_is_kept():
    limited = ScheduleProblem(1, ONE_RANK.pipelines, memory_limit=1.0)
    check(PipelineProgram.from_text(limited, "0F0 0B0 0F1 0B1"))
    assert refusal(limited, "0F0 0F1 0B0 0B1") == "program: rank 0 holds activations of 2; memory_limit=1"


def test_predicted_peaks_count_from_forward_to_backward():
    problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 2, 1, 2, (3, 5)), Pipeline("critic", (1,), 1, 1, 2, 7)))
    orders = parse_text("0F0 0F1 0B0 0B1\n1F0 0F0 0B0 1B0 0F1 0B1\n")
    assert predicted_peaks(lower(problem, orders)) == (6.0, 12.0)
