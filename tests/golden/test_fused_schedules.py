"""Published instances that the portfolio solves in little work: the bound, with at most the published memory."""

import json
from pathlib import Path

import pytest

from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.spec.problem import Pipeline, Problem

ROWS = json.loads(Path(__file__).with_name("fused_schedule_instances.json").read_text())["instances"]


@pytest.mark.parametrize("row", [ROWS[2], ROWS[5], ROWS[11]], ids=lambda row: f"instance{row['id']}")
def test_at_the_bound_within_the_published_memory(row):
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
    schedule = solve(Problem(row["n0"], (big, *copies)), "portfolio", Budget(60))
    assert schedule.optimal
    assert schedule.makespan == row["lower_bound"]
    assert schedule.peak_memory <= row["paper_mem_annealed"]
