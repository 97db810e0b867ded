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


def test_a_plugin_is_written_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """tests/contracts/test_third_party_plugin.py installs it and runs its tests."""
    out = tmp_path / "acme-fuse"
    assert run("example", "plugin", "--out", out) == 0
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert written == ["README.md", "acme_fuse.py", "pyproject.toml", "tests/test_acme_fuse.py"]
    assert (
        capsys.readouterr().out == f"{out}: a plugin; next: pip install -e {out}, then python -m pytest {out}/tests\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["acme-fuse"]


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    refused = {
        ("plugin",): "example plugin is a folder of files: add --out DIR, a folder that does not exist yet",
        (
            "plugin",
            "--out",
            tmp_path / "there",
        ): "there: it exists; name a folder that does not exist yet, or move this",
        ("plugin", "--out", tmp_path / "file"): "file: it exists; name a folder",
        ("plugin", "--out", tmp_path / "no/such"): "such: cannot be written: No such file or directory",
        ("plugin", "--out", tmp_path / "file/in"): "in: cannot be written: Not a directory",
        ("plan", "--out", tmp_path / "new"): "--out is for plugin; example plan is printed: verl-fuse example plan >",
        ("plugn",): "no example 'plugn' (did you mean 'plugin'?); allowed: workload, cluster, plan, plugin",
    }
    for arguments, message in refused.items():
        assert run("example", *arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


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
