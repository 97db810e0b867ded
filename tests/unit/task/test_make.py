import json
import subprocess
import sys

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.euclid import Pair
from verl_fuse_cpu.task.make import MANIFEST, make, row
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


def test_a_directory_with_the_same_manifest_is_left_alone(tmp_path):
    parameters = Parameters(seed=7)
    (tmp_path / MANIFEST).write_text(json.dumps(parameters.manifest()))
    assert make(tmp_path, parameters) is False
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("work")
    with pytest.raises(
        FuseError, match=r"holds files but no manifest\.json of this task: name an empty or new directory"
    ):
        make(tmp_path, Parameters())


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


def test_the_command_refuses_bad_arguments_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "verl_fuse_cpu.task", "--out", str(tmp_path / "out"), "--largest", "1000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, "verl_fuse_cpu.task: largest number 1000: allowed 10 to 99")
    assert not (tmp_path / "out").exists()
