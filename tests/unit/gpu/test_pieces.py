"""The invariants in the docstring of ci/gpu/pieces.py."""

import random
from pathlib import Path

import pytest

from ci.gpu.pieces import LIST, MIB, cut, find, joined

CONTENT = random.Random(0).randbytes(3 * MIB + 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("most", [MIB, MIB + 1, 700_001, len(CONTENT), 30 * MIB])
def test_what_is_read_is_what_was_cut(file: Path, tmp_path: Path, most: int):
    pieces = cut(file, tmp_path / "pieces", most)
    sizes = [piece.stat().st_size for piece in pieces]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) < len(sizes)
    assert len(pieces) == -(-len(CONTENT) // most)
    found = find([tmp_path / "pieces"])
    assert found == pieces
    assert joined(found).read() == CONTENT


def test_pieces_of_an_earlier_file_are_gone(file: Path, tmp_path: Path):
    cut(file, tmp_path / "pieces", MIB)
    file.write_bytes(b"short")
    (piece,) = cut(file, tmp_path / "pieces", MIB)
    assert {path.name for path in (tmp_path / "pieces").iterdir()} == {piece.name, LIST}


def test_pieces_are_found_in_several_folders(file: Path, tmp_path: Path):
    pieces = cut(file, tmp_path / "a", 2 * MIB)
    (tmp_path / "b").mkdir()
    pieces[0].rename(tmp_path / "b" / pieces[0].name)
    assert joined(find([tmp_path / "a", tmp_path / "b"])).read() == CONTENT
    with pytest.raises(ValueError, match=rf"b: no {LIST}"):
        find([tmp_path / "b"])


def test_missing_and_damaged_pieces_are_named(file: Path, tmp_path: Path):
    first, second, *_ = cut(file, tmp_path / "pieces", MIB)
    first.write_bytes(b"x" + first.read_bytes()[1:])
    second.unlink()
    with pytest.raises(ValueError, match=r"piece-00 is damaged, piece-01 is missing$"):
        find([tmp_path / "pieces"])
