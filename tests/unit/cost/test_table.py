"""The profile's file form, and refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
from tables import measured, table

from verl_fuse.cost.floors import NO_FLOORS
from verl_fuse.cost.table import Measurement, ProfileTable
from verl_fuse.errors import FuseError


def broken(**changes: object) -> str:
    return json.dumps({**json.loads(table().to_json()), **changes})


@pytest.mark.parametrize("engine", [None, NO_FLOORS])
def test_the_json_form_says_the_same(tmp_path: Path, engine):
    written = dataclasses.replace(table(), engine=engine, sources=("run",))
    written.write(tmp_path / "profile.json")
    read = ProfileTable.read(tmp_path / "profile.json")
    assert dataclasses.asdict(read) == dataclasses.asdict(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a verl-fuse profile"),
        ("[]", "profile version None"),
        (broken(version=2), "profile version 2; this release reads 1"),
        (broken(models={}), "profile.models={}: needs a list"),
        (broken(speed=1), "profile.speed: unknown key"),
        (broken(threads="1"), "profile.threads='1'"),
        (broken(device=None), "profile.device: missing name, memory, flops, bandwidth"),
        (broken(engine={}), "profile.engine: missing name, block"),
        (
            broken(device={"name": "x", "memory": 1.0, "flops": 1.0, "bandwidth": 0.0}),
            "bandwidth=0.0; needs a number > 0",
        ),
        (
            broken(models=[{"tp": 1, "measurements": None}]),
            r"2 problems:\n  - profile.models\[0\].measurements=null: needs a list",
        ),
        (broken(models=[{"tp": 1}]), r"profile.models\[0\]: missing model, optimizer_rate, measurements"),
        (broken(models=[{"tp": 1, "measurements": []}]), r"profile.models\[0\]: missing model, optimizer_rate"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(FuseError, match=rf"profile\.json: .*{message}"):
        ProfileTable.read(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": [[1.0]]}, "needs 3 x 2 times"),
        ({"seconds": [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]}, "0.0 seconds; needs finite numbers > 0"),
        (
            {"seconds": [[1.0, 1.0], [1.0, True], [1.0, 1.0]]},
            r"models\[0\].measurements\[0\].seconds\[1\]=\[1.0, True\]: needs a list of float",
        ),
        ({"batches": [4, 1, 16]}, r"batches=\[4, 1, 16\]; needs ascending"),
        ({"part": "tail"}, "needs one of 'embedding', 'block', 'head'"),
        ({"part": "head", "direction": "decode"}, "needs one measurement of"),
    ],
)
def test_a_wrong_measurement_is_refused(change: dict, message: str):
    data = json.loads(table().to_json())
    data["models"][0]["measurements"][0] |= change
    with pytest.raises(FuseError, match=message):
        ProfileTable.from_json(json.dumps(data))


def test_a_measurement_has_a_time_for_every_pair():
    first = measured().measurements[0]
    with pytest.raises(FuseError, match="needs 3 x 2 times"):
        Measurement(first.part, first.direction, first.batches, first.lengths, first.seconds[:2])
