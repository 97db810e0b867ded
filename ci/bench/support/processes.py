"""Find the processes of a run from outside, by a variable that all inherit, and read their memory and open files."""

import os
from collections.abc import Iterator
from pathlib import Path


def processes(variable: str, value: str) -> Iterator[int]:
    """Yield the pids of living processes of this user that inherited `variable=value`, without this process."""
    mark = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            # The process has ended in the meantime, or belongs to another user.
            continue
        if marked and int(folder.name) != os.getpid():
            yield int(folder.name)


def kind(pid: int) -> str:
    """Return the name that a process gives itself; empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident_mb(pid: int) -> float:
    """Return the resident memory in MB; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def handles(pid: int) -> int:
    """Return the number of open file descriptors; 0 once the process has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
