"""Get a released package from the package index, as source only: its wheel, unpacked, without its dependencies."""

import subprocess
import sys
import zipfile
from pathlib import Path

from verl_fuse.errors import FuseError

LATEST = "latest"


def fetch(package: str, version: str, folder: Path) -> tuple[Path, str]:
    """Download `package` in `version` (or `latest`) with pip into `folder`; return the folder of the unpacked wheel,
    without its libraries, and the version found. A FuseError has pip's last words."""
    requirement = package if version == LATEST else f"{package}=={version}"
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
        wheel.extractall(unpacked, [name for name in wheel.namelist() if not name.endswith(".so")])
    return unpacked, wheels[0].name.split("-")[1]
