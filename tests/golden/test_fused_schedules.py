"""Published instances that take little work to solve: the bound, with at most the published memory."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from verl_fuse.schedule.bounds import makespan_bound
from verl_fuse.schedule.descent import Goal
from verl_fuse.schedule.greedy import candidates
from verl_fuse.schedule.in_flight import InFlightSearch
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.period import period_of
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.stretch import stretch
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

ROWS = json.loads(Path(__file__).with_name("fused_schedule_instances.json").read_text())["instances"]
FOREVER = float("inf")


def problem(row: dict[str, Any]) -> ScheduleProblem:
    big = Pipeline("actor", range(row["n0"]), row["m0"], row["f0"], 2 * row["f0"], row["mem0"])
    copies = [
        Pipeline(
            "critic",
            range((k + 1) * row["n1"] - 1, k * row["n1"] - 1, -1),
            row["m1"],
            row["f1"],
            2 * row["f1"],
            row["mem1"],
        )
        for k in range(row["n0"] // row["n1"])
    ]
    return ScheduleProblem(row["n0"], (big, *copies))


@pytest.mark.parametrize("row", [ROWS[2], ROWS[5], ROWS[11]], ids=lambda row: f"instance{row['id']}")
def test_at_the_bound_within_the_published_memory(row):
    schedule = solve(problem(row), "portfolio", Budget(60))
    assert schedule.optimal
    assert schedule.makespan == row["lower_bound"]
    assert schedule.peak_memory <= row["paper_mem_annealed"]


@pytest.mark.parametrize("row", [ROWS[0], ROWS[6]], ids=lambda row: f"instance{row['id']}")
def test_long_ones_by_stretching(row):
    """Stretch shorter solutions, a part of the portfolio, without a clock: these took the annealing of the paper 918 s
    and 4042 s on 512 processors."""
    period = period_of(OpTable(problem(row)))
    assert period is not None
    goal = Goal(
        makespan_bound(period.short),
        row["paper_mem_annealed"],
        candidates(period.short, FOREVER)[0],
        FOREVER,
        lambda solution: None,
    )
    attempt = InFlightSearch(period.short, 0)
    for seed in range(12):
        if not goal.over:
            attempt.run(goal, 3.0, seed)
    schedule = stretch(period, goal.incumbent, goal.incumbent.peak, 0, time.monotonic() + 60)
    assert schedule is not None
    assert schedule.makespan == row["lower_bound"]
    assert schedule.peak <= row["paper_mem_annealed"]
