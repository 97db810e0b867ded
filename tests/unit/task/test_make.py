import errno
import json
import os
import subprocess
import sys

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.euclid import Pair
from verl_fuse_cpu.task.folder import MANIFEST, PARTS, _locked, make_folder
from verl_fuse_cpu.task.make import make, row
from verl_fuse_cpu.task.parameters import Parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"largest": 100}, "largest number 100: allowed 10 to 99"),
        ({"largest": 9}, "largest number 9: allowed 10 to 99"),
        ({"train": 0}, "0 training problems: allowed 1 or more"),
        ({"validation": -1}, "-1 validation problems: allowed 1 or more"),
        ({"tail_exponent": -0.5}, "tail exponent -0.5: allowed 0 to 3"),
        ({"seed": -1}, "seed -1: allowed 0 or more"),
        ({"layers": 0}, "0 layers: allowed 1 to 64"),
    ],
)
def test_bad_parameters_name_the_value_and_what_is_allowed(change, message):
    with pytest.raises(FuseError, match=f"^{message}"):
        Parameters(**change)


def build(folder):
    for part in PARTS:
        (folder / part).write_text("made")


def test_a_directory_with_the_same_manifest_is_left_alone(tmp_path):
    assert make_folder(tmp_path / "out", {"seed": 7}, build) is True
    (tmp_path / "out" / "model").write_text("trained further")
    assert make_folder(tmp_path / "out", {"seed": 7}, build) is False
    assert (tmp_path / "out" / "model").read_text() == "trained further"
    assert make_folder(tmp_path / "out", {"seed": 8}, build) is True
    assert (tmp_path / "out" / "model").read_text() == "made"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_has_lost_a_file_says_what_to_delete(tmp_path):
    make_folder(tmp_path / "out", {}, build)
    for part in ("model", "train.parquet"):
        (tmp_path / "out" / part).unlink()
    with pytest.raises(FuseError, match=r"out has lost model, train\.parquet: delete .*out to make it again$"):
        make_folder(tmp_path / "out", {}, build)


def test_what_fails_half_way_leaves_nothing_behind(tmp_path):
    def fill_the_disk(folder):
        build(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "model"))

    with pytest.raises(FuseError, match=r"out cannot be made: No space left on device; nothing was left behind$"):
        make_folder(tmp_path / "out", {}, fill_the_disk)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FuseError, match=r"out cannot be made: File exists"):
        make_folder(tmp_path / "file" / "out", {}, build)


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path):
    def fail(folder):
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        make_folder(tmp_path / "out", {}, fail)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_half_made_is_removed_and_what_is_being_made_is_not(tmp_path):
    for pid in ("1", "2"):
        (tmp_path / f".out-{pid}").mkdir()
    with _locked(tmp_path / ".out-2"):
        make_folder(tmp_path / "out", {}, build)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-2", "out"]


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("work")
    with pytest.raises(
        FuseError, match=r"holds files but no manifest\.json of this task: name an empty or new directory"
    ):
        make(tmp_path, Parameters())


@pytest.mark.parametrize(
    ("name", "what"), [("thesis.tex", "thesis.tex, which is not of this task"), ("", "another task")]
)
def test_a_folder_with_a_manifest_and_other_things_is_left_as_it_is(tmp_path, name, what):
    manifest = {"format": 1, "seed": 0} if name else {"version": 3}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / (name or "model")).write_text("work")
    with pytest.raises(FuseError, match=f"{tmp_path} holds {what}: name an empty or new directory"):
        make_folder(tmp_path, {"format": 2, "seed": 0}, lambda out: pytest.fail("built"))
    assert (tmp_path / (name or "model")).read_text() == "work"


def test_a_torn_manifest_says_what_to_delete(tmp_path):
    (tmp_path / MANIFEST).write_text('{"format": 1')
    with pytest.raises(FuseError, match=f"delete {tmp_path} to make it again"):
        make(tmp_path, Parameters())


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(FuseError, match="out is a file; a directory is needed"):
        make(tmp_path / "out", Parameters())


def test_a_problem_has_the_columns_of_verl():
    assert row(Pair(12, 18), "train", 3) == {
        "data_source": "verl_fuse_cpu/euclid",
        "prompt": [{"role": "user", "content": "gcd 12 18"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "12 06;06 06;=06"},
        "extra_info": {"split": "train", "index": 3},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--largest", "1000"], "largest number 1000: allowed 10 to 99"),
        (["--model", "smollm2", "--tools"], "--tools: only with --model euclid"),
        (["--wheel", "FILE"], "--wheel: only with --model smollm2"),
    ],
)
def test_the_command_refuses_bad_arguments_without_a_traceback(tmp_path, arguments, message):
    command = [sys.executable, "-m", "verl_fuse_cpu.task", "--out", str(tmp_path / "out"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, f"verl_fuse_cpu.task: {message}")
    assert not (tmp_path / "out").exists()
