"""The schedule's JSON and text forms."""

import json

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Op, Schedule, parse_text


@pytest.fixture
def schedule() -> Schedule:
    problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2, 1.5),))
    ops = (
        Op(1, 0, "B", 0, 2.0, 4.0),
        Op(0, 0, "B", 0, 4.0, 6.0),
        Op(0, 0, "F", 0, 0.0, 1.0),
        Op(1, 0, "F", 0, 1.0, 2.0),
    )
    return Schedule(problem, ops, 6.0, 6.0, True, 1.5, 1.5, True, 0.1, "serial")


def test_ops_are_sorted_and_the_text_has_a_line_per_rank(schedule):
    assert schedule.to_text() == "0F0 0B0\n0F0 0B0\n"
    assert [op.start for op in schedule.ops] == [0.0, 4.0, 1.0, 2.0]
    assert schedule.bubble == 0.5


def test_round_trip(schedule, tmp_path):
    assert Schedule.from_json(schedule.to_json()) == schedule
    schedule.write(tmp_path / "s.json")
    assert Schedule.read(tmp_path / "s.json") == schedule
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_the_form_is_the_documented_one(schedule):
    data = json.loads(schedule.to_json())
    fields = (
        "makespan lower_bound optimal peak_memory memory_lower_bound memory_optimal solve_seconds method problem ops"
    )
    assert list(data) == fields.split()
    assert data["ops"][0] == {"rank": 0, "pipeline": 0, "kind": "F", "microbatch": 0, "start": 0.0, "end": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"makespan": "6"}, "makespan='6'; needs a finite number"),
        ({"optimal": 1}, "optimal=1; needs a bool"),
        ({"lower_bound": float("nan")}, "lower_bound=nan"),
        ({"ops": [{"rank": 0}]}, "not a verl-fuse schedule"),
        (
            {"ops": [{"rank": 9, "pipeline": 0, "kind": "F", "microbatch": 0, "start": 0, "end": 1}]},
            "not part of its problem",
        ),
        (
            {"ops": [{"rank": 0, "pipeline": 0, "kind": "X", "microbatch": 0, "start": 0, "end": 1}]},
            "not a verl-fuse schedule",
        ),
    ],
)
def test_bad_schedule(schedule, change, message):
    with pytest.raises(FuseError, match=message):
        Schedule.from_json(json.dumps(json.loads(schedule.to_json()) | change))


def test_text_parses_back_to_orders(schedule):
    assert parse_text("0F0 1F12\n\n0B0\n") == (((0, "F", 0), (1, "F", 12)), (), ((0, "B", 0),))
    assert parse_text(schedule.to_text()) == (((0, "F", 0), (0, "B", 0)),) * 2
    with pytest.raises(FuseError, match="rank 1: 'F0'"):
        parse_text("0F0\nF0\n")


def test_an_unwritable_path_is_named(schedule, tmp_path):
    with pytest.raises(FuseError, match=r"absent/s.json: cannot be written"):
        schedule.write(tmp_path / "absent" / "s.json")
