"""A schedule with one thing wrong is refused, with the row printed; the independent checker agrees."""

from dataclasses import replace

import pytest
from checker import faults
from problems import two_ranks

from verl_fuse.errors import FuseError
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule


@pytest.fixture
def schedule() -> Schedule:
    return solve(two_ranks(2, memory_limit=4.0, transfer=0.5), "back-to-back", Budget(1))


def moved(schedule: Schedule, token: str, rank: int, by: float, stretch: float = 0.0) -> Schedule:
    ops = [
        op._replace(start=op.start + by, end=op.end + by + stretch) if (op.token, op.rank) == (token, rank) else op
        for op in schedule.ops
    ]
    return replace(schedule, ops=tuple(ops))


def test_a_right_schedule_passes(schedule):
    validate(schedule)
    assert faults(schedule) == []


@pytest.mark.parametrize(
    ("token", "rank", "by", "stretch", "message"),
    [
        ("0F0", 1, -0.5, 0, r"op 0F0 on rank 1 at 1 starts before its input has arrived\n  rank 1: >0F0< 0B0"),
        ("0F1", 0, -0.5, 0, "op 0F1 on rank 0 at 0.5 starts before the micro-batch ahead of it has ended"),
        ("1B1", 1, 3.0, 0, r"makespan=\S+, but its ops give"),
        ("0F0", 0, 0, 1.0, "takes 2, its stage says 1"),
    ],
)
def test_one_fault(schedule, token, rank, by, stretch, message):
    wrong = moved(schedule, token, rank, by, stretch)
    assert faults(wrong) != []
    with pytest.raises(FuseError, match=message):
        validate(wrong)


def test_missing_double_overlapping_and_over_the_limit(schedule):
    with pytest.raises(FuseError, match="op 0F0 on rank 0 is missing"):
        validate(replace(schedule, ops=schedule.ops[1:]))
    with pytest.raises(FuseError, match="op 0F0 on rank 0 at 0 appears twice"):
        validate(replace(schedule, ops=(*schedule.ops, schedule.ops[0])))
    last = schedule.rows[0][-1]
    first = next(op for op in schedule.rows[0] if op.token == "1F0")
    assert first.start < last.start
    with pytest.raises(FuseError, match="over memory_limit=1"):
        validate(replace(schedule, problem=replace(schedule.problem, memory_limit=1.0)))
    shifted = moved(schedule, "1F0", 1, -2.0)
    assert any("overlap" in fault for fault in faults(shifted))
    with pytest.raises(FuseError, match="overlaps the op before it"):
        validate(shifted)


@pytest.mark.parametrize(("activation", "peak"), [((3, 1), 6.0), ((1, 3), 3.0)])
def test_the_peak_is_that_of_the_fullest_rank(activation, peak):
    """The first stage holds two micro-batches at once, the last one."""
    problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 3, 1, 2, activation),), peak)
    found = solve(problem, "serial", Budget(1))
    assert found.peak_memory == peak
    with pytest.raises(FuseError, match=f"peak_memory=2.5, but its ops give {peak:g}"):
        validate(replace(found, peak_memory=2.5))
