"""Watching a run, and reading back what it left: small programs stand for verl here, and real files for its numbers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci.upstream.ab import runs
from ci.upstream.ab.record import read
from verl_fuse.cli import child
from verl_fuse.errors import FuseError

# Takes 64 MiB, in a process that outlives its parent, as Ray's do.
GREEDY = """
import subprocess, sys, time
code = "held = bytearray(64 * 2**20); print(1, flush=True); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
time.sleep(2)
print(child.pid, flush=True)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "LOOK", 0.05)
    monkeypatch.setattr(child, "TERMINATE_SECONDS", 0.3)


def watch(code: str, folder: Path) -> tuple[int | None, int]:
    with (folder / "log.txt").open("wb") as output:
        return runs.watch([sys.executable, "-c", code], {}, folder, output)


def test_memory_of_all_processes_counts_and_none_is_left(tmp_path: Path):
    code, peak = watch(GREEDY, tmp_path)
    assert code == 3
    assert 64 * 2**20 < peak < 256 * 2**20
    assert runs.memory(int((tmp_path / "log.txt").read_text().split()[0])) == 0


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "TIMEOUT", 0.3)
    before = time.monotonic()
    code, _ = watch("import time; time.sleep(60)", tmp_path)
    assert code is None
    assert time.monotonic() - before < 30


def test_an_ended_process_holds_no_memory():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert runs.memory(process.pid) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two replayed steps and one that generates, as a run and its recorder leave them."""
    torch = pytest.importorskip("torch")
    numbers = tmp_path / "numbers"
    numbers.mkdir()
    lines = [{"step": step, "data": {"actor/pg_loss": 0.5 * step, "note": "text"}} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    begins = [{"step": step, "time": 100.0 + 3 * step} for step in (1, 2, 3)]
    (numbers / "begins.jsonl").write_text("".join(json.dumps(line) + "\n" for line in begins))
    for step in (1, 2):
        rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        torch.save({"padding": [False, True], "rows": {"values": rows}}, numbers / f"batch_{step}.pt")
        for rank in (0, 1):
            torch.save({"layer.weight": torch.full((2,), float(rank))}, numbers / f"actor_{step}_rank{rank}.pt")
    (tmp_path / "log.txt").write_text("first line\nlast line\n")
    return tmp_path


def test_a_record_holds_every_quantity_of_the_replayed_steps(folder: Path):
    record = read("observe", 0, 7, folder, (1, 2))
    assert (record.name, record.peak_bytes, sorted(record.replayed), sorted(record.live)) == ("observe", 7, [1, 2], [3])
    step = record.steps[1]
    assert step.metrics == {"actor/pg_loss": 0.5}
    assert {name: sorted(items) for name, items in step.numbers.items()} == {
        "values": ["0", "1"],
        "padding": ["rows"],
        "actor parameters": ["rank0:layer.weight", "rank1:layer.weight"],
    }
    assert step.numbers["values"]["0"].tolist() == [1.0, 2.0]
    assert step.numbers["actor parameters"]["rank1:layer.weight"].tolist() == [1.0, 1.0]
    assert record.steps[3].numbers == {}


def test_a_step_lasts_until_the_next_one_begins(folder: Path):
    record = read("observe", 0, 0, folder, (1, 2))
    assert {number: step.seconds for number, step in record.steps.items()} == {1: 3.0, 2: 3.0, 3: None}


def test_a_failed_run_leaves_the_end_of_its_log(folder: Path):
    (folder / "numbers/batch_2.pt").unlink()
    record = read("observe", 1, 0, folder, (1, 2))
    assert (record.steps, record.note) == ({}, "first line\nlast line\n")


@pytest.mark.parametrize("name", ["batch_2.pt", "begins.jsonl"])
def test_numbers_that_were_not_saved_are_named(folder: Path, name: str):
    (folder / "numbers" / name).unlink()
    with pytest.raises(FuseError, match=f"{name}: the run observe ended well"):
        read("observe", 0, 0, folder, (1, 2))
