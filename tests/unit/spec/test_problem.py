"""The problem's JSON form, and every refusal."""

import json

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

ACTOR = {"model": "actor", "ranks": [0, 1], "microbatches": 4, "forward": 5, "backward": [10, 11], "activation": 1.95}


def data(**changes) -> dict:
    return {"ranks": 2, "memory_limit": None, "transfer": 0, "pipelines": [ACTOR]} | changes


def test_a_number_stands_for_every_stage():
    pipeline = ScheduleProblem.from_dict(data()).pipelines[0]
    assert pipeline.forward == (5.0, 5.0)
    assert pipeline.backward == (10.0, 11.0)


def test_round_trip_and_digest():
    problem = ScheduleProblem.from_dict(data(memory_limit=4, transfer=0.5))
    assert ScheduleProblem.from_json(problem.to_json()) == problem
    assert ScheduleProblem.from_json(problem.to_json()).digest == problem.digest
    assert ScheduleProblem.from_dict(data()).digest != problem.digest


def test_defaults():
    problem = ScheduleProblem(1, (Pipeline("actor", [0], 1, 1, 1, 1),))
    assert (problem.memory_limit, problem.transfer, problem.ops) == (None, 0.0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": [0, 0]}, r"ranks=\[0, 0\] puts two stages on rank 0"),
        ({"ranks": [0, 2]}, r"unknown rank 2; allowed: 0\.\.1"),
        ({"ranks": [0, -1]}, "rank -1"),
        ({"ranks": []}, r"ranks=\[\]"),
        ({"microbatches": 0}, "microbatches=0; needs a whole number >= 1"),
        ({"microbatches": 2.5}, "microbatches=2.5"),
        ({"microbatches": True}, "microbatches=True"),
        ({"microbatches": 10**6}, "4000000 ops .* at most 200000"),
        ({"forward": -5}, "forward=-5; needs a finite number > 0"),
        ({"forward": 0}, "forward=0; needs a finite number > 0"),
        ({"backward": [1, 2, 3]}, "3 values for 2 stages"),
        ({"backward": [1, float("nan")]}, "backward=nan"),
        ({"backward": "10"}, "backward='10'"),
        ({"activation": float("inf")}, "activation=inf"),
        ({"activation": -0.5}, "activation=-0.5; needs a finite number >= 0"),
        ({"forward": 10**400}, "forward does not fit a float"),
        ({"model": ""}, "model=''"),
        ({"speed": 1}, "pipeline 0: unknown key 'speed'"),
    ],
)
def test_bad_pipeline(change, message):
    with pytest.raises(FuseError, match=message):
        ScheduleProblem.from_dict(data(pipelines=[ACTOR | change]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"pipelines": []}, r"pipelines=\[\]"),
        ({"pipelines": {}}, "needs a list"),
        ({"pipelines": [3]}, "pipeline 0: 3"),
        ({"transfer": float("nan")}, "transfer=nan"),
        ({"memory_limit": "8"}, "memory_limit='8'"),
        ({"memory_limit": 1.9}, "memory_limit=1.9 is infeasible.*the least feasible limit is 1.95"),
        ({"limit": 8}, "unknown key 'limit'; keys: ranks, memory_limit, transfer, pipelines"),
    ],
)
def test_bad_problem(change, message):
    with pytest.raises(FuseError, match=message):
        ScheduleProblem.from_dict(data(**change))


def test_missing_key_and_broken_json_name_the_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text('{"ranks": 2}')
    with pytest.raises(FuseError, match=r"problem.json: problem: missing key 'pipelines'"):
        ScheduleProblem.read(path)
    path.write_text("{")
    with pytest.raises(FuseError, match=r"problem\.json: problem is not JSON"):
        ScheduleProblem.read(path)
    with pytest.raises(FuseError, match=r"absent\.json: cannot be read"):
        ScheduleProblem.read(tmp_path / "absent.json")


def test_the_form_is_the_documented_one():
    text = ScheduleProblem.from_dict(data()).to_json()
    assert list(json.loads(text)) == ["ranks", "memory_limit", "transfer", "pipelines"]
    assert list(json.loads(text)["pipelines"][0]) == [
        "model",
        "ranks",
        "microbatches",
        "forward",
        "backward",
        "activation",
    ]
