"""Tells the death of a process, whatever engine runs in it. Light: neither verl nor an engine is imported."""

import signal
from pathlib import Path

from ray.exceptions import RayTaskError

# The kernel's PF_EXITING.
EXITING = 0x4


def is_dying(pid: int) -> bool:
    """Tell whether a process of this machine has been killed, or is gone: known before the process has given back its
    memory, which is when its parent hears of the death."""
    try:
        status, stat = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "stat"))
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigPnd:"))
    # Fields after the program's name: state, five numbers, the kernel's flags.
    flags = int(stat.rpartition(")")[2].split()[6])
    return bool(pending & 1 << (signal.SIGKILL - 1) or flags & EXITING)


def first_line(error: Exception) -> str:
    """Return an error in one line; Ray's errors carry whole tracebacks, and the error raised inside an actor."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
