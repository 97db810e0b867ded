import os
import stat
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import check_writable, load, save, write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_what_was_saved_is_loaded(tmp_path: Path):
    save(tmp_path / "number.txt", "7")
    assert load(tmp_path / "number.txt", int) == 7


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(FuseError, match=r"nowhere/plan\.json: cannot be written"):
        save(tmp_path / "nowhere/plan.json", "")


@pytest.mark.parametrize(
    "place",
    ["nowhere/plan.json", "file/plan.json", "folder", "n" * 300],
    ids=["no folder", "in a file", "a folder", "long"],
)
def test_what_could_not_be_saved_is_known_before(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for refused in (check_writable, lambda path: save(path, "")):
        with pytest.raises(FuseError, match=f"{place}: cannot be written"):
            refused(tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_asking_whether_a_file_can_be_written_leaves_it_alone(tmp_path: Path):
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        check_writable(tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "old")]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    check_writable(tmp_path / "link.json")
    save(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not UTF-8"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FuseError, match=r"plan\.json: cannot be read"):
        load(path, str)


def test_a_fault_in_the_content_names_the_file(tmp_path: Path):
    def refuse(text: str) -> None:
        raise FuseError("ranks=0; needs a whole number >= 1")

    (tmp_path / "problem.json").write_text("{}")
    with pytest.raises(FuseError, match=r"problem\.json: ranks=0; needs a whole number >= 1"):
        load(tmp_path / "problem.json", refuse)
