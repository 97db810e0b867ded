"""Makes the pieces that bring vLLM, Ray, verl and what they need to a machine with a GPU, torch and no network.

    python -m ci.gpu.pack --into FOLDER   # pip's own settings say where it takes the wheels from
    python -m ci.gpu.pack --lock          # after a version in wheels.lock was changed: write its sums again

`wheels.lock` has the packages that the machine lacks, all of them, as pip reads it: nothing is resolved, and a file
with another sum is refused. Pip unpacks them for the machine's Python (3.12), whatever Python runs here. What no visit
uses is deleted (DROPPED), debugging symbols are stripped (STRIPPED), and of CUDA's fat binaries only the machine code
of one chip is kept: the rest becomes zeros, which compress to nothing and leave every offset in the library as it was.
flash-attn's stand-in comes along, and the metadata of verl-fuse, so that verl finds it as a plugin; its code is that of
the working tree. The whole is one tar.xz, cut into pieces of at most MIB_OF_A_PIECE MiB. Needs pip, tar, xz and strip.

Invariants (tests/unit/gpu/test_pack.py):
- a line of the lock without a sum is refused, and a file whose sum is another;
- machine code of the chip is kept byte for byte, other code becomes zeros, and the rest of a library is not touched;
- a name that is to be deleted or stripped must exist: a new version is looked at again;
- the metadata names every entry point of pyproject.toml, and the top-level module that transformers asks for.
"""

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from mmap import mmap
from pathlib import Path

from ci.gpu.pieces import MIB, cut
from verl_fuse import __version__

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(__file__).with_name("wheels.lock")
STAND_IN = Path(__file__).with_name("stand_in")
STAND_IN_VERSION = "2.8.3"
MIB_OF_A_PIECE = 58
CHIP = 90
LINE = re.compile(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}")
# The machine's Python. Pip takes a platform literally: each version of glibc that wheels were built for is named.
GLIBC = (34, 31, 28, 27, 26, 25, 24, 17, 12, 5)
PLATFORMS = [*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "manylinux2010", "manylinux1"]
TARGET = ["--python-version=3.12", "--implementation=cp", *(f"--platform={name}_x86_64" for name in PLATFORMS)]
# One package is published as source alone.
BINARY = ["--only-binary=:all:", "--no-binary=antlr4-python3-runtime"]
DROPPED = (
    "bin",
    # Tokenizers of one vendor's models.
    "mistral_common/data/tekken_*.json",
    "pycountry/locales",
    "ray/dashboard/client",
    "ray/jars",
    "ray/llm",
    "ray/rllib",
    "ray/serve",
    "ray/train",
    "ray/tune",
    # Chips before Hopper.
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    # Quantised weights, and chips after Hopper.
    "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    # The server's other front end.
    "vllm/vllm-rs",
)
STRIPPED = ("ray/_raylet.so", "ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
# A fat binary: magic, version, bytes of the header, bytes that follow; then entries of code. In an entry: kind of code,
# version, bytes of its header, bytes of the code; further on the chip.
FAT = struct.Struct("<IHHQ")
FAT_MAGIC, FAT_VERSION = 0xBA55ED50, 1
ENTRY = struct.Struct("<HHIQ")
ENTRY_CHIP = 28
TEXT, MACHINE_CODE = 1, 2
FAILED = 2


def read_lock(path: Path) -> list[str]:
    """Return the lines `name==version --hash=sha256:...`; a ValueError names a line that is something else."""
    numbered = [(number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    for number, line in lines:
        if not LINE.fullmatch(line):
            needed = "needs name==version --hash=sha256:SUM, which --lock writes"
            raise ValueError(f"{path.name}, line {number}: {line!r}: {needed}")
    return [line for _, line in lines]


def write_lock(path: Path) -> int:
    """Ask pip for the sum of each version in the file, and write them; return their number."""
    text = path.read_text().splitlines()
    comments = [line for line in text if line.startswith("#")]
    pins = [line.split()[0] for line in text if line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip(["--dry-run", "--ignore-installed", f"--report={report}", *pins], Path(folder) / "site")
        files = [(each["metadata"], each["download_info"]) for each in json.loads(report.read_text())["install"]]
    sums = {_plain(own["name"]): info["archive_info"]["hashes"]["sha256"] for own, info in files}
    lines = [f"{pin} --hash=sha256:{sums[_plain(pin.split('==')[0])]}" for pin in sorted(pins, key=str.lower)]
    path.write_text("\n".join([*comments, *lines]) + "\n")
    return len(lines)


def unpack(lock: Path, site: Path) -> None:
    """Let pip fetch and unpack the packages of the lock; it compares their sums."""
    read_lock(lock)
    _pip(["--no-compile", "--require-hashes", f"--requirement={lock}"], site)


def prune(site: Path, dropped: Sequence[str], stripped: Sequence[str]) -> None:
    for pattern in dropped:
        for path in _existing(site, pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    files = [path for pattern in stripped for path in _existing(site, pattern)]
    if files:
        subprocess.run(["strip", "--strip-unneeded", *map(str, files)], check=True)


def thin(library: Path, chip: int) -> tuple[int, int]:
    """Zero all code in the fat binaries of a library but the chip's machine code; return the bytes of code kept and
    zeroed."""
    kept = zeroed = 0
    with library.open("r+b") as file, mmap(file.fileno(), 0) as data:
        magic, place = struct.pack("<I", FAT_MAGIC), 0
        while (place := data.find(magic, place)) >= 0:
            entries = _entries(data, place)
            for at, length, kind, own in entries:
                if (kind, own) == (MACHINE_CODE, chip):
                    kept += length
                else:
                    data[at : at + length] = bytes(length)
                    zeroed += length
            place = entries[-1][0] + entries[-1][1] if entries else place + len(magic)
    return kept, zeroed


def libraries(site: Path) -> Iterator[Path]:
    for path in sorted(site.rglob("*.so")):
        with path.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                yield path


def write_metadata(
    site: Path,
    name: str,
    version: str,
    modules: Sequence[str],
    groups: Mapping[str, Mapping[str, str]],
    needs: Sequence[str] = (),
) -> None:
    """Write what `importlib.metadata` asks of an installed distribution; `groups` are its entry points."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    head = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {each}" for each in needs),
    ]
    (folder / "METADATA").write_text("\n".join(head) + "\n")
    (folder / "top_level.txt").write_text("".join(f"{module}\n" for module in modules))
    points = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(points))


def add_ours(site: Path) -> None:
    """Add flash-attn's stand-in, and the metadata of verl-fuse."""
    shutil.copytree(STAND_IN, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_metadata(site, "flash-attn", STAND_IN_VERSION, ["flash_attn"], {})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    write_metadata(site, project["name"], __version__, ["verl_fuse"], groups, project["dependencies"])


def compress(folder: Path, archive: Path) -> None:
    """Write a tar.xz of the folder; `xz -6e` with a dictionary of 256 MiB makes four fifths of it in four times as
    long."""
    with (
        archive.open("wb") as file,
        subprocess.Popen(["tar", "-C", str(folder), "--sort=name", "-cf", "-", "."], stdout=subprocess.PIPE) as tar,
        subprocess.Popen(["xz", "-T2", "-6", "-c"], stdin=tar.stdout, stdout=file) as xz,
    ):
        assert tar.stdout is not None
        tar.stdout.close()
    if tar.returncode or xz.returncode:
        raise OSError(f"tar ended with {tar.returncode}, xz with {xz.returncode}")


def pack(lock: Path, into: Path, chip: int = CHIP) -> list[Path]:
    with tempfile.TemporaryDirectory() as folder:
        site, begun = Path(folder) / "site", time.monotonic()

        def tell(text: str) -> None:
            print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

        unpack(lock, site)
        tell(f"{len(read_lock(lock))} packages unpacked, {_mib(site):.0f} MiB")
        prune(site, DROPPED, STRIPPED)
        for library in libraries(site):
            kept, zeroed = thin(library, chip)
            if kept + zeroed:
                if not kept:
                    raise ValueError(f"{library.relative_to(site)}: no code for chip {chip}; needs a line in DROPPED")
                tell(f"{library.relative_to(site)}: {kept / MIB:.1f} MiB of code kept, {zeroed / MIB:.1f} zeroed")
        add_ours(site)
        tell(f"{_mib(site):.0f} MiB are left")
        compress(site, archive := Path(folder) / "site.tar.xz")
        pieces = cut(archive, into, MIB_OF_A_PIECE * MIB)
        sizes = ", ".join(f"{piece.name} {piece.stat().st_size / MIB:.1f} MiB" for piece in pieces)
        tell(f"{sizes} in {into}")
    return pieces


def _entries(data: mmap, place: int) -> list[tuple[int, int, int, int]]:
    """Return place, length, kind and chip of each code in the fat binary at `place`; none where it is no fat binary:
    its entries fill it exactly, and are of known kinds."""
    if place + FAT.size > len(data):
        return []
    _, version, header, size = FAT.unpack_from(data, place)
    at, end = place + header, place + header + size
    if version != FAT_VERSION or header != FAT.size or end > len(data):
        return []
    found = []
    while at + ENTRY_CHIP + 4 <= end:
        kind, _, header, length = ENTRY.unpack_from(data, at)
        (chip,) = struct.unpack_from("<I", data, at + ENTRY_CHIP)
        if kind not in (TEXT, MACHINE_CODE) or header < ENTRY_CHIP + 4:
            return []
        found.append((at + header, length, kind, chip))
        at += header + length
    return found if at == end else []


def _pip(arguments: Sequence[str], site: Path) -> None:
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--no-deps", *BINARY, *TARGET, f"--target={site}"]
    if code := subprocess.run([*command, *arguments], check=False).returncode:
        raise ValueError(f"pip ended with {code}")


def _existing(site: Path, pattern: str) -> list[Path]:
    if not (found := sorted(site.glob(pattern))):
        raise ValueError(f"{pattern} is not in these packages: see DROPPED and STRIPPED in ci/gpu/pack.py")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.pack", description=__doc__)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--into", type=Path, help="the folder of the pieces")
    wanted.add_argument("--lock", action="store_true", help="write the sums of the versions in the lock")
    parser.add_argument("--chip", type=int, default=CHIP, help="compute capability without the dot")
    options = parser.parse_args(arguments)
    try:
        if options.lock:
            print(f"{write_lock(LOCK)} sums in {LOCK}")
        else:
            pack(LOCK, options.into, options.chip)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"ci.gpu.pack: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
