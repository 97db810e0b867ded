"""`python -m ci.upstream check`: its exit codes and its report, on the installed verl and on changed copies of it."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.upstream import check
from ci.upstream.__main__ import main as dispatch
from verl_fuse.host.start.compat.seams import PACKAGES
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.host.upstream.versions import installed

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES) or installed("verl") != "0.9.1",
    reason="checks the installed verl 0.9.1",
)
TRAINER = "trainer/ppo/v1/trainer_base.py"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A source tree with a copy of the installed verl."""
    found = SourceTree.installed("verl").roots["verl"]
    shutil.copytree(found, tmp_path / "tree/verl", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tree"


def replace(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "verl" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def test_a_fault_of_ours_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(check, "main", lambda arguments: 1 // 0)
    assert dispatch(["check"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_installed_verl_is_green(capsys: pytest.CaptureFixture[str]):
    assert check.main([]) == 0
    assert capsys.readouterr().out.startswith("# verl-fuse on verl 0.9.1: green\n")


def test_changed_code_is_yellow_with_its_diff(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    replace(
        copy,
        TRAINER,
        "        prepare_metrics = self.prepare_step()\n",
        "        prepare_metrics = self.prepare_step() or {}\n",
    )
    assert check.main(["--path", str(copy), "--output", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    assert text == (tmp_path / "out/upstream.md").read_text()
    assert "## Yellow: changed, to be read again (1)" in text
    assert (
        "| `verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync.step` | verl_fuse.host.start.contracts.trainer | body "
        "changed" in text
    )
    assert "--- verl 0.9.1\n+++ checked\n" in text
    assert (
        "-        prepare_metrics = self.prepare_step()\n+        prepare_metrics = self.prepare_step() or {}\n" in text
    )
    report = json.loads((tmp_path / "out/upstream.json").read_text())
    assert (report["level"], report["verl"], report["supported"]) == ("yellow", "0.9.1", True)
    (row,) = report["rows"]
    assert (row["contract"], row["level"]) == ("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync.step", "yellow")
    assert row["diff"].startswith("--- verl 0.9.1\n+++ checked\n@@ ")


def test_a_fixed_defect_is_red_until_its_patch_is_removed(copy: Path, capsys: pytest.CaptureFixture[str]):
    replace(
        copy,
        "utils/model.py",
        'attn_implementation="flash_attention_2",\n            trust',
        "attn_implementation=None,\n            trust",
    )
    assert check.main(["--path", str(copy / "verl")]) == 2
    text = capsys.readouterr().out
    assert "## Red: would break (1)" in text
    assert "patch critic_attention: the patched code changed" in text
    assert "drop the patch if upstream is fixed" in text


def test_a_version_outside_the_supported_range_is_said(copy: Path, capsys: pytest.CaptureFixture[str]):
    (copy / "verl/version/version").write_text("0.10.0.dev\n")
    assert check.main(["--path", str(copy)]) == 0
    assert "verl 0.10.0.dev is outside the supported versions" in capsys.readouterr().out


def test_code_that_was_read_at_another_version_has_no_diff(copy: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(check.report.READ_AT, "verl", ("0.9.2",))
    replace(
        copy,
        TRAINER,
        "        prepare_metrics = self.prepare_step()\n",
        "        prepare_metrics = self.prepare_step() or {}\n",
    )
    assert check.main(["--path", str(copy)]) == 1
    assert "No diff: verl 0.9.2, at which this was read, is not installed here." in capsys.readouterr().out


@pytest.mark.parametrize("version", ["", "main"])
def test_a_version_that_is_none_is_outside_the_supported_range(copy: Path, version: str, capsys):
    (copy / "verl/version/version").write_text(version)
    assert check.main(["--path", str(copy)]) == 0
    assert f"verl {version or 'of unknown version'} is outside the supported versions" in capsys.readouterr().out


def test_the_package_folder_may_be_the_current_one(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(copy / "verl")
    assert check.main(["--path", "."]) == 0


def test_source_that_is_not_utf_8_is_red(copy: Path, capsys: pytest.CaptureFixture[str]):
    file = copy / "verl" / TRAINER
    file.write_bytes(file.read_bytes() + "# é".encode("latin-1"))
    assert check.main(["--path", str(copy)]) == 2
    assert "trainer_base.py cannot be parsed: 'utf-8' codec" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_neither_green_nor_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert check.main(["--output", str(tmp_path / "file")]) == 3
    assert "ci.upstream check: [Errno 17] File exists: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "nowhere"], "--path nowhere: neither a package folder verl nor one that contains it"),
        (["--verl", "0.9.0", "--path", "."], "not allowed with argument"),
        (["--version"], "unrecognized arguments: --version"),
    ],
)
def test_what_cannot_be_checked_is_neither_green_nor_red(arguments: list[str], message: str, repo: Path):
    command = [sys.executable, "-m", "ci.upstream", "check", *arguments]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert message in done.stderr


def test_an_unknown_command_is_refused_with_the_choices(repo: Path):
    done = subprocess.run(
        [sys.executable, "-m", "ci.upstream", "chek"], cwd=repo, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("usage: python -m ci.upstream {")
