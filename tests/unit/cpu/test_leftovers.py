"""Which buffers are leftovers, and which are left alone."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_fuse_cpu.leftovers import leftovers, remove_leftovers


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    path = tmp_path / "verl_weights_0123"
    path.write_bytes(bytes(4096))
    return path


def test_a_buffer_nobody_uses_is_removed(tmp_path, buffer):
    assert remove_leftovers(tmp_path) == [buffer]
    assert not buffer.exists()
    assert remove_leftovers(tmp_path) == []


def test_an_open_buffer_is_left(tmp_path, buffer):
    with buffer.open("rb"):
        assert remove_leftovers(tmp_path) == []
    assert leftovers(tmp_path) == [buffer]


def test_a_locked_buffer_is_left_even_if_its_owner_is_out_of_sight(tmp_path, buffer, monkeypatch):
    # As seen from a container whose /proc does not show the owner.
    monkeypatch.setattr("verl_fuse_cpu.leftovers._files_in_use", lambda: iter(()))
    with buffer.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert remove_leftovers(tmp_path) == []
    assert remove_leftovers(tmp_path) == [buffer]


# mmap keeps a descriptor of its own; the second program drops every descriptor and keeps the mapping.
OPEN = "file = open({path!r})"
MAPPED = """
import mmap, os
file = open({path!r}, 'rb')
mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
for name in os.listdir('/proc/self/fd'):
    if os.path.realpath('/proc/self/fd/' + name) == {path!r}:
        os.close(int(name))
"""


@pytest.mark.parametrize("use", [OPEN, MAPPED], ids=["open", "mapped"])
def test_a_buffer_of_another_process_is_left_until_that_ends(tmp_path, buffer, use):
    program = use.format(path=str(buffer)) + "\nprint('ready', flush=True); input(); import os; os._exit(0)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert remove_leftovers(tmp_path) == []
        owner.communicate("\n")
    assert remove_leftovers(tmp_path) == [buffer]


def test_other_names_links_and_folders_are_left(tmp_path, buffer):
    (tmp_path / "psm_1").write_bytes(b"1")
    (tmp_path / "verl_weights_folder").mkdir()
    (tmp_path / "verl_weights_link").symlink_to(tmp_path / "psm_1")
    assert remove_leftovers(tmp_path) == [buffer]
    assert {path.name for path in tmp_path.iterdir()} == {"psm_1", "verl_weights_folder", "verl_weights_link"}


def test_files_of_another_user_are_left(tmp_path, buffer, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: buffer.stat().st_uid + 1)
    assert leftovers(tmp_path) == []
