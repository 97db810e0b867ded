"""Each example file is read by the commands that it is for."""

import json
from pathlib import Path

import pytest

from verl_fuse.cli.example import FILES, text_of
from verl_fuse.cli.main import main
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.workload import Workload


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """Return the file that `verl-fuse example KIND > KIND.yaml` leaves."""
    paths = {}
    for kind in FILES:
        assert run("example", kind) == 0
        paths[kind] = tmp_path / f"{kind}.yaml"
        paths[kind].write_text(capsys.readouterr().out)
    return paths


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.mark.parametrize("kind", FILES)
def test_it_is_commented(kind: str):
    lines = text_of(kind).splitlines()
    assert max(map(len, lines)) <= 150
    keys = [line.split(":")[0] for line in lines if line and line[0].isalpha()]
    assert keys
    # A group of keys stands under its comment.
    assert sum(line.startswith("#") for line in lines) >= len(keys) // 2


def test_the_files_are_read(written: dict[str, Path]):
    workload, cluster, plan = (
        read(written[kind]) for kind, read in zip(FILES, (Workload.read, Cluster.read, Plan.read), strict=True)
    )
    assert workload.sequences == 512
    assert cluster.devices == 32
    assert [call.call for call in plan.calls] == [call.name for call in workload.calls]


def test_simulate_takes_all_of_them(written: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    shown = ["--seeds", "1", "--json"]
    assert run("simulate", written["workload"], written["cluster"], "--strategy", "stock", *shown) == 0
    assert json.loads(capsys.readouterr().out)["usd_per_device_hour"] == 2.5
    assert (
        run("simulate", written["workload"], "h100x2", "--plan", written["plan"], "--strategy", "realloc", *shown) == 0
    )
    assert [row["strategy"] for row in json.loads(capsys.readouterr().out)["strategies"]] == ["stock", "realloc"]


def test_plan_takes_workload_and_cluster(written: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert run("plan", written["workload"], written["cluster"], "--strategy", "fsdp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 32
