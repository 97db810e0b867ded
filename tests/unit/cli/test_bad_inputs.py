"""Every bad input ends in one line on stderr and exit code 2: no traceback, no long wait, no memory taken."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bad_inputs
import pytest
from bad_inputs import LIMIT_SECONDS, TABLE, arguments_of, peak_kilobytes, write

COMMAND = [sys.executable, "-c", "from verl_fuse.cli import main; main()"]
GIGABYTE = 2**20
# As programs of their own; the rest share one process.
ALONE = (
    "workload: a number of prompts beyond any batch",
    "simulate step.yaml h100x99999999",
    "workload file: without end",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the results of the table in one process."""
    command = [sys.executable, bad_inputs.__file__]
    folder = tmp_path_factory.mktemp("bad")
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("index", range(len(TABLE)), ids=[bad.name for bad in TABLE])
def test_a_bad_input_is_refused_in_one_line(report: dict, index: int):
    bad, outcome = TABLE[index], report["outcomes"][index]
    assert outcome["code"] == 2, outcome["err"]
    assert bad.says in outcome["err"]
    assert outcome["err"].startswith("verl-fuse: ")
    assert outcome["err"].count("\n") == 1
    assert outcome["out"] == ""
    assert outcome["seconds"] < LIMIT_SECONDS


def test_all_of_them_together_take_little_memory(report: dict):
    assert len(TABLE) >= 80
    assert report["kilobytes"] < GIGABYTE


@pytest.mark.parametrize("name", ALONE)
def test_as_a_program_of_its_own(tmp_path: Path, name: str):
    (bad,) = [bad for bad in TABLE if bad.name == name]
    write(bad, tmp_path)
    used = 0
    with subprocess.Popen(
        [*COMMAND, *arguments_of(bad)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        while child.poll() is None:
            used = max(used, peak_kilobytes(child.pid))
            time.sleep(0.01)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (2, "")
    assert bad.says in err
    assert err.count("\n") == 1
    assert 0 < used < GIGABYTE


@pytest.mark.parametrize("arguments", [["--version"], ["recipes"], ["example", "workload"], ["trace", "-h"]])
def test_a_full_disk_behind_stdout_is_one_line(arguments: list[str]):
    with Path("/dev/full").open("w") as full:
        child = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert child.returncode == 2
    assert child.stderr == "verl-fuse: stdout cannot be written: No space left on device\n"


def test_a_reader_that_goes_away_is_no_fault():
    read, written = os.pipe()
    os.close(read)
    child = subprocess.run(
        [*COMMAND, "example", "workload"], stdout=written, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(written)
    assert (child.returncode, child.stderr) == (1, "")


# The moment is counted in the command, not in Python's own start. A SIGINT that this test inherits
# as ignored would stay so.
INTERRUPTED = """
import os, signal, sys, threading, time
from verl_fuse.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
seconds = float(sys.argv.pop(1))
threading.Thread(target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
main()
"""


@pytest.mark.parametrize("seconds", ["0.02", "0.3", "3"])
def test_ctrl_c_is_one_line_from_the_first_import_on(tmp_path: Path, seconds: str):
    (tmp_path / "step.yaml").write_text(json.dumps({**bad_inputs.WORKLOAD, "prompts": 65536}))
    command = [sys.executable, "-c", INTERRUPTED, seconds, "simulate", "step.yaml", "h100x4", "--seeds", "1000"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert child.returncode == 128 + signal.SIGINT
    assert [line for line in child.stderr.splitlines() if " s: " not in line] == ["verl-fuse: interrupted"]
