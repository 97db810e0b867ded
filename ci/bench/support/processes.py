"""Processes of a run, seen from outside: found by a variable that all inherit, with their memory and open files."""

import os
from collections.abc import Iterator
from pathlib import Path


def processes(variable: str, value: str) -> Iterator[int]:
    """Pids of living processes of this user that inherited `variable=value`, without this one."""
    mark = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            # Ended in the meantime, or another user's.
            continue
        if marked and int(folder.name) != os.getpid():
            yield int(folder.name)


def kind(pid: int) -> str:
    """The name that a process gives itself; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident_mb(pid: int) -> float:
    """Resident memory in MB; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def handles(pid: int) -> int:
    """Open file descriptors; 0 once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
