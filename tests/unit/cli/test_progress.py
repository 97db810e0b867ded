"""Progress on stderr."""

import time

import pytest

from verl_fuse.cli import progress
from verl_fuse.cli.progress import ProgressNotes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Tenths of a second instead of seconds."""
    for name, seconds in {"PATIENCE": 0.2, "IN_LOG": 0.1, "ON_TERMINAL": 0.1, "AGAIN": 0.5}.items():
        monkeypatch.setattr(progress, name, seconds)


def texts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert all(line.startswith("verl-fuse: ") for line in lines)
    return [line.split(" s: ", 1)[1] for line in lines]


def test_what_ends_soon_is_silent(capsys: pytest.CaptureFixture[str]):
    with ProgressNotes("reading") as report:
        report("solving")
    assert texts(capsys) == []


def test_each_text_is_said_once_and_the_last_one_again(capsys: pytest.CaptureFixture[str]):
    with ProgressNotes("compiling") as report:
        time.sleep(0.35)
        report("solving")
        time.sleep(1.2)
    said = texts(capsys)
    assert said[0] == "compiling"
    assert said.count("compiling") == 1
    assert 2 <= said.count("solving") <= 4


def test_texts_that_follow_each_other_too_fast_are_left_out(capsys: pytest.CaptureFixture[str]):
    begun = time.monotonic()
    with ProgressNotes("step 0") as report:
        for step in range(1000):
            report(f"step {step}")
            time.sleep(0.001)
    # On a busy machine the thousand take longer than a second.
    assert len(texts(capsys)) <= 10 * (time.monotonic() - begun) + 2


def test_an_error_ends_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt), ProgressNotes("solving"):
        raise KeyboardInterrupt
    time.sleep(0.4)
    assert texts(capsys) == []
