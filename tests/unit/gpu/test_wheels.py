"""The invariants in the docstring of ci/gpu/wheels.py."""

import json
import random
from pathlib import Path

import pytest

from ci.gpu.wheels import LIST, MIB, join, main, pack

SIZES = {
    "a-1-py3-none-any.whl": 10,
    "b-2-py3-none-any.whl": 2 * MIB + 17,
    "c-3-py3-none-any.whl": MIB,
    "d-1-py3-none-any.whl": 3,
}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    draw = random.Random(0)
    for name, size in SIZES.items():
        (folder / name).write_bytes(draw.randbytes(size))
    return folder


@pytest.mark.parametrize("size", [MIB, MIB + 1, 700_001, 30 * MIB])
def test_what_is_joined_is_what_was_packed(wheels: Path, tmp_path: Path, size: int):
    pieces = pack(wheels, tmp_path / "pieces", size)
    assert all(0 < piece.stat().st_size <= size for piece in pieces)
    assert len(pieces) == -(-sum(SIZES.values()) // size)
    joined = join(tmp_path / "pieces", tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in joined} == {p.name: p.read_bytes() for p in wheels.iterdir()}


def test_pieces_that_fit_exactly_leave_no_empty_one(wheels: Path, tmp_path: Path):
    total = sum(SIZES.values())
    assert [piece.stat().st_size for piece in pack(wheels, tmp_path / "pieces", total)] == [total]


def test_missing_and_damaged_pieces_are_named(wheels: Path, tmp_path: Path):
    first, second, *_ = pack(wheels, tmp_path / "pieces", MIB)
    first.write_bytes(b"x" + first.read_bytes()[1:])
    second.unlink()
    with pytest.raises(ValueError, match="piece-000 is damaged, piece-001 is missing"):
        join(tmp_path / "pieces", tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_two_versions_and_no_wheels_are_refused(wheels: Path, tmp_path: Path):
    (wheels / "A-2-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(ValueError, match="two wheels of a; needs one"):
        pack(wheels, tmp_path / "pieces")
    with pytest.raises(ValueError, match="no wheels"):
        pack(tmp_path, tmp_path / "pieces")


def test_the_command_packs_and_joins(wheels: Path, tmp_path: Path, capsys):
    assert main(["pack", str(wheels), "--into", str(tmp_path / "pieces"), "--mib", "1"]) == 0
    assert main(["join", str(tmp_path / "pieces"), "--into", str(tmp_path / "joined")]) == 0
    assert "4 pieces in" in capsys.readouterr().out
    assert (
        len(json.loads((tmp_path / "pieces" / LIST).read_text())["wheels"])
        == len(list((tmp_path / "joined").iterdir()))
        == 4
    )
    assert main(["join", str(tmp_path), "--into", str(tmp_path / "joined")]) == 2
