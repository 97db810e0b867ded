"""`python -m ci.gpu.wheels pack|join` brings wheels to a machine without a network, in pieces of at most 60 MiB.

`pack FOLDER --into PIECES` cuts all wheels of a folder into numbered pieces with a list of sums; `join PIECES --into
FOLDER` puts the pieces together again, wherever they have come in, and installs the wheels with `--target`. Neither
command needs more than Python.

Invariants (tests/unit/gpu/test_wheels.py):
- the joined wheels are byte for byte the packed ones, and a piece that is missing or damaged is named;
- no piece is larger than asked for, and the wheels of one distribution are of one version.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

MIB = 2**20
PIECE = 60 * MIB
LIST = "wheels.json"
FAILED = 2


def pack(folder: Path, into: Path, size: int = PIECE) -> list[Path]:
    """Cut the wheels of `folder`, one after the other, into pieces of at most `size` bytes; raise ValueError where
    there are none, or two of one distribution."""
    wheels = sorted(folder.glob("*.whl"))
    names = [wheel.name.split("-")[0].lower() for wheel in wheels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{folder}: two wheels of {', '.join(twice)}; needs one")
    if not wheels:
        raise ValueError(f"{folder}: no wheels")
    into.mkdir(parents=True, exist_ok=True)
    content = [{"name": wheel.name, "bytes": wheel.stat().st_size, "sha256": _sum(wheel)} for wheel in wheels]
    pieces: list[Path] = []
    left, piece = 0, None
    for wheel in wheels:
        with wheel.open("rb") as file:
            while True:
                if left == 0:
                    if piece is not None:
                        piece.close()
                    pieces.append(into / f"piece-{len(pieces):03}")
                    piece, left = pieces[-1].open("wb"), size
                assert piece is not None
                block = file.read(min(left, MIB))
                if not block:
                    break
                piece.write(block)
                left -= len(block)
    assert piece is not None
    piece.close()
    if pieces[-1].stat().st_size == 0:
        pieces.pop().unlink()
    listed = [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sum(path)} for path in pieces]
    (into / LIST).write_text(json.dumps({"wheels": content, "pieces": listed}, indent=1) + "\n")
    return pieces


def join(pieces: Path, into: Path) -> list[Path]:
    """Return the wheels put together again; a ValueError names pieces that are missing or damaged."""
    listed = json.loads((pieces / LIST).read_text())
    paths = [pieces / piece["name"] for piece in listed["pieces"]]
    wrong = [
        f"{path.name} is {'damaged' if path.exists() else 'missing'}"
        for path, piece in zip(paths, listed["pieces"], strict=True)
        if not path.exists() or _sum(path) != piece["sha256"]
    ]
    if wrong:
        raise ValueError(f"{pieces}: {', '.join(wrong)}")
    into.mkdir(parents=True, exist_ok=True)
    stream = _blocks(paths)
    wheels, rest = [], b""
    for wheel in listed["wheels"]:
        wheels.append(into / wheel["name"])
        wanted = wheel["bytes"]
        with wheels[-1].open("wb") as file:
            while wanted:
                rest = rest or next(stream)
                file.write(rest[:wanted])
                taken = min(wanted, len(rest))
                rest, wanted = rest[taken:], wanted - taken
        if _sum(wheels[-1]) != wheel["sha256"]:
            raise ValueError(f"{wheel['name']}: not what was packed")
    return wheels


def install(wheels: list[Path], target: Path) -> None:
    """Install wheels into a folder for PYTHONPATH, without a network and without looking for their requirements: the
    machine has torch and CUDA."""
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "--target", str(target), *map(str, wheels)], check=True
    )


def _blocks(paths: list[Path]):
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(MIB):
                yield block


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.wheels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="cut the wheels of a folder into pieces")
    joining = commands.add_parser("join", help="put pieces together")
    for each in (packing, joining):
        each.add_argument("folder", type=Path)
        each.add_argument("--into", type=Path, required=True)
    packing.add_argument("--mib", type=int, default=PIECE // MIB, help="of a piece at most")
    joining.add_argument("--target", type=Path, help="install what was joined there, for PYTHONPATH")
    options = parser.parse_args(arguments)
    try:
        if options.command == "pack":
            pieces = pack(options.folder, options.into, options.mib * MIB)
            print(f"{len(pieces)} pieces in {options.into}")
        else:
            wheels = join(options.folder, options.into)
            if options.target:
                install(wheels, options.target)
            print(f"{len(wheels)} wheels in {options.into}")
    except (OSError, ValueError) as error:
        print(f"ci.gpu.wheels {options.command}: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
