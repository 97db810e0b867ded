"""Shows the invariants of `verl_fuse_speculation.shelf`."""

import os
import struct
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse_speculation.prompts import PromptDigest
from verl_fuse_speculation.shelf import FILE_SHARE, SAMPLES_SUFFIX, PastSample, Shelf, say_step

LONGEST, VOCABULARY = 100, 1000
PROMPT = PromptDigest.of(np.array([5, 6, 7], np.int32))


def sample(*tokens: int, step: int = 1) -> PastSample:
    return PastSample(PROMPT, step, np.array([6, 7], np.int32), np.array(tokens, np.int32))


def shelf_of(folder: Path, limit: int = 1 << 20) -> Shelf:
    return Shelf(folder, limit, LONGEST, VOCABULARY)


def read(shelf: Shelf) -> list[tuple]:
    return [(s.prompt, s.step, s.context.tolist(), s.tokens.tolist()) for s in shelf.news()]


def test_what_one_leaves_the_others_find_once(tmp_path):
    one, other = shelf_of(tmp_path), shelf_of(tmp_path)
    one.put([sample(1, 2), sample(3, step=4)])
    assert read(other) == [(PROMPT, 1, [6, 7], [1, 2]), (PROMPT, 4, [6, 7], [3])]
    one.put([sample(9)])
    assert read(other) == [(PROMPT, 1, [6, 7], [9])]
    assert read(other) == read(one) == []
    # One that starts later, after a restart for instance, finds all of it.
    assert len(read(shelf_of(tmp_path))) == 3


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_sample_is_read_when_it_is_whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shelf")
    whole = sample(1, 2, 3).to_bytes() + sample(4).to_bytes()
    at = data.draw(st.integers(0, len(whole)))
    path, shelf = folder / f"other-0{SAMPLES_SUFFIX}", shelf_of(folder)
    path.write_bytes(whole[:at])
    found = read(shelf)
    with path.open("ab") as file:
        file.write(whole[at:])
    assert [tokens for *_, tokens in found + read(shelf)] == [[1, 2, 3], [4]]


def test_the_oldest_files_make_room(tmp_path):
    limit = 16_000
    shelves = [shelf_of(tmp_path, limit), shelf_of(tmp_path, limit)]
    for number in range(200):
        for shelf in shelves:
            shelf.put([sample(*range(100), step=number)])
    held = sum(path.stat().st_size for path in tmp_path.glob(f"*{SAMPLES_SUFFIX}"))
    assert limit / 2 < held <= limit + 2 * (limit * FILE_SHARE + 500)
    newest = max(step for _, step, *_ in read(shelf_of(tmp_path, limit)))
    assert newest == 199


def test_a_file_that_goes_while_it_is_read_is_nothing(tmp_path):
    one, other = shelf_of(tmp_path), shelf_of(tmp_path)
    one.put([sample(1)])
    found = other._by_age()
    found[0].unlink()
    assert list(other._unread(found[0])) == []


def test_the_driver_says_the_step(tmp_path):
    shelf = shelf_of(tmp_path / "new")
    assert shelf.step() == 0
    say_step(tmp_path / "new", 12)
    assert shelf.step() == 12


def test_nothing_follows_what_a_full_disk_cut_off(tmp_path, monkeypatch):
    one, other = shelf_of(tmp_path), shelf_of(tmp_path)
    one.put([sample(1, 2)])
    opened = Path.open

    def full(path, mode="r"):
        if mode != "ab":
            return opened(path, mode)
        with opened(path, mode) as file:
            file.write(sample(7, 7, 7).to_bytes()[:-5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space left"):
            one.put([sample(7, 7, 7)])
    one.put([sample(3)])
    assert [tokens for _, _, _, tokens in read(other)] == [[1, 2], [3]]


def test_a_file_that_made_room_is_not_begun_again(tmp_path):
    one, other = shelf_of(tmp_path), shelf_of(tmp_path)
    one.put([sample(1, 2, 3, 4, 5)])
    assert len(read(other)) == 1
    for path in tmp_path.glob(f"*{SAMPLES_SUFFIX}"):
        path.unlink()
    one.put([sample(6)])
    assert [tokens for _, _, _, tokens in read(other)] == [[6]]


def test_a_step_that_cannot_be_read_is_none(tmp_path):
    shelf = shelf_of(tmp_path)
    assert shelf.step() == 0
    (tmp_path / "step").write_text("")
    assert shelf.step() == 0
    say_step(tmp_path, 7)
    assert shelf.step() == 7
    (tmp_path / "step").write_bytes(b"\xff" * (1 << 20))
    assert shelf.step() == 0


def record(tokens=2, context=1, length=3, step=1, ids=(5, 6, 7)) -> bytes:
    return struct.pack("<iiii16s", tokens, context, length, step, PROMPT.digest) + np.array(ids, np.int32).tobytes()


@pytest.mark.parametrize(
    "damaged",
    [
        record(tokens=-8, context=0),
        record(tokens=-1),
        record(context=-1),
        record(tokens=LONGEST + 1, context=0, ids=range(LONGEST + 1)),
        record(tokens=0, context=LONGEST + 1, ids=range(LONGEST + 1)),
        record(length=-1),
        record(length=LONGEST + 1),
        record(step=-1),
        record(ids=(5, VOCABULARY, 7)),
        record(ids=(5, 6, -1)),
        b"\xff" * 4096,
    ],
    ids=[
        "endless",
        "tokens below 0",
        "context below 0",
        "too many tokens",
        "too much context",
        "length below 0",
        "too long a prompt",
        "step below 0",
        "a token beyond the vocabulary",
        "a token below 0",
        "no header",
    ],
)
def test_a_damaged_file_is_named_once_and_left_after_what_is_whole(tmp_path, caplog, damaged):
    damaged_file, other = tmp_path / f"a-0{SAMPLES_SUFFIX}", shelf_of(tmp_path)
    damaged_file.write_bytes(record() + damaged + record())
    reader = shelf_of(tmp_path)
    assert [sample.tokens.tolist() for sample in islice(reader.news(), 9)] == [[6, 7]]
    with damaged_file.open("ab") as file:
        file.write(record())
    other.put([sample(9)])
    assert [sample.tokens.tolist() for sample in islice(reader.news(), 9)] == [[9]], "others are read"
    (line,) = caplog.messages
    assert line.startswith(f"{damaged_file} is damaged, and left: ")


def test_the_largest_sample_and_token_are_read(tmp_path, caplog):
    ids = [VOCABULARY - 1, *range(2 * LONGEST - 1)]
    whole = record(tokens=LONGEST, context=LONGEST, length=LONGEST, step=0, ids=ids)
    (tmp_path / f"a-0{SAMPLES_SUFFIX}").write_bytes(3 * whole)
    # The file is larger than the folder may be, and is read a sample at a time.
    reader = shelf_of(tmp_path, 1)
    assert [len(read(reader)) for _ in range(4)] == [1, 1, 1, 0]
    assert caplog.messages == []


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / f"a-0{SAMPLES_SUFFIX}")
    (tmp_path / f"b-0{SAMPLES_SUFFIX}").mkdir()
    assert read(shelf_of(tmp_path)) == []
