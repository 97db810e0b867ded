"""1F1B and its two serial uses read like the figure."""

import pytest
from problems import PUBLISHED, published, two_ranks

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, ScheduleProblem


def test_one_pipeline_reads_like_the_figure():
    problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 3, 1, 2, 1),))
    schedule = solve(problem, "back-to-back", Budget(1))
    assert schedule.to_text() == "0F0 0F1 0B0 0F2 0B1 0B2\n0F0 0B0 0F1 0B1 0F2 0B2\n"
    assert (schedule.makespan, schedule.peak_memory, schedule.optimal) == (12.0, 2.0, True)


def test_a_memory_limit_shortens_the_warm_up():
    problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 3, 1, 2, 1),), memory_limit=1.0)
    assert solve(problem, "serial", Budget(1)).to_text() == "0F0 0B0 0F1 0B1 0F2 0B2\n0F0 0B0 0F1 0B1 0F2 0B2\n"


def test_serial_waits_for_every_rank_and_back_to_back_does_not():
    assert solve(two_ranks(2), "serial", Budget(1)).makespan == 18.0
    assert solve(two_ranks(2), "back-to-back", Budget(1)).makespan == 17.0


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"instance{row['id']}")
def test_published_figures(row):
    problem = published(row)
    serial, back_to_back = solve(problem, "serial", Budget(1)), solve(problem, "back-to-back", Budget(1))
    assert (serial.makespan, serial.peak_memory) == (row["serial_1f1b"], row["mem_serial_1f1b"])
    assert back_to_back.makespan == row["back_to_back_1f1b"]
    assert serial.lower_bound == row["lower_bound"]
