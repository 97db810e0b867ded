"""What the demo of a published language model needs is refused before anything is downloaded."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import room


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function of what the machine has free, disk and memory, that returns what is lacking in `runs`."""

    def lacking(disk: int, memory: int, **of_container: str) -> list[str]:
        group = tmp_path / "sys/fs/cgroup"
        for folder in (tmp_path / "proc", group):
            folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {memory // 1024} kB\n")
        for name, content in of_container.items():
            (group / f"memory.{name}").write_text(content)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=disk))
        return room.lacking(tmp_path / "runs/of/mine", tmp_path)

    return lacking


def test_what_suffices_is_at_the_bounds(machine, tmp_path):
    memory = room.MEMORY // 1024 * 1024 + 1024
    assert machine(room.DISK, memory) == []
    assert machine(room.DISK - 1, memory) == [
        f"{tmp_path}: 1.0 GB are free; the demo needs 1 GB, or VERL_FUSE_HOME on another disk"
    ]
    (short,) = machine(room.DISK, memory - 2048)
    assert short.startswith("memory: ")
    assert short.endswith(f"needs {room.MEMORY / 1e9:.0f} GB, and `make demo` 9 GB")
    assert len(machine(0, 0)) == 2


def test_a_container_has_what_its_limit_leaves(machine):
    memory = 2 * room.MEMORY
    group = {"current": str(10**9), "stat": f"anon 5\ninactive_file {4 * 10**8}\n"}
    assert machine(room.DISK, memory, max="max\n", **group) == []
    assert machine(room.DISK, memory, max=str(room.MEMORY + 6 * 10**8), **group) == []
    assert len(machine(room.DISK, memory, max=str(room.MEMORY + 6 * 10**8 - 1), **group)) == 1


def test_it_runs_with_python_alone(repo: Path, tmp_path: Path):
    alone = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(repo)!r}); import ci.room"]
    subprocess.run(alone, check=True, cwd=tmp_path)


def test_the_target_asks_for_room_before_it_installs(repo: Path):
    lines = (repo / "Makefile").read_text().partition("\ndemo-real:")[2].splitlines()
    assert not lines[0].partition("##")[0].strip()
    assert "ci.room" in lines[1]
    assert "setup-real" in lines[2]
