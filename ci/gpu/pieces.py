"""Cuts a file into numbered pieces that a machine without a network can be given one by one, with a list of their
sums, and reads the file from the pieces again.

Invariants (tests/unit/gpu/test_pieces.py):
- what is read is byte for byte what was cut; no piece is larger than asked for, and all are about equally large;
- pieces that are missing or damaged are all named before the first byte is read, wherever the pieces came in.
"""

import hashlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

MIB = 2**20
LIST = "pieces.json"


def cut(file: Path, into: Path, most: int) -> list[Path]:
    """Write the file in as few pieces of at most `most` bytes as it takes, and LIST beside them; replace older ones."""
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("piece-*"):
        old.unlink()
    total = file.stat().st_size
    count = max(1, math.ceil(total / most))
    size = math.ceil(total / count)
    pieces = [into / f"piece-{number:02}" for number in range(count)]
    with file.open("rb") as content:
        for path in pieces:
            with path.open("wb") as piece:
                left = size
                while left and (block := content.read(min(left, MIB))):
                    piece.write(block)
                    left -= len(block)
    listed = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in pieces]
    (into / LIST).write_text(json.dumps(listed, indent=1) + "\n")
    return pieces


def find(folders: Sequence[Path]) -> list[Path]:
    """Return the pieces in their order, from any of the folders; a ValueError names the missing and damaged ones."""
    places = {path.name: path for folder in folders for path in sorted(folder.glob("piece*"))}
    if LIST not in places:
        raise ValueError(f"{', '.join(map(str, folders))}: no {LIST}")
    listed = json.loads(places[LIST].read_text())
    wrong = [
        f"{each['name']} is {'damaged' if each['name'] in places else 'missing'}"
        for each in listed
        if each["name"] not in places or sha256(places[each["name"]]) != each["sha256"]
    ]
    if wrong:
        raise ValueError(f"{', '.join(map(str, folders))}: {', '.join(wrong)}")
    return [places[each["name"]] for each in listed]


def joined(pieces: Sequence[Path]) -> BinaryIO:
    """Return the file in the pieces, in memory."""
    return io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
