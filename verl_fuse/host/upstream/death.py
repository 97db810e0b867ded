"""How the death of a rollout replica shows to those who call it. Light: neither verl nor vLLM is imported."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

# The kernel's PF_EXITING.
EXITING = 0x4


def is_death(error: RayError) -> bool:
    """Whether this says that a replica's server is gone, or that its engine process is (vLLM's EngineDeadError, raised inside the server)."""
    # A failed task raises a class of Ray's that also derives from the class raised inside the actor.
    return isinstance(error, RayActorError) or any(cls.__name__ == "EngineDeadError" for cls in type(error).__mro__)


def engine_processes(server: Any) -> Sequence[Any]:
    """Inside a rollout server: the processes of its engine, as far as it knows of them (vLLM's AsyncLLM does)."""
    resources = getattr(getattr(getattr(server, "engine", None), "engine_core", None), "resources", None)
    return getattr(getattr(resources, "engine_manager", None), "processes", ())


def is_dying(pid: int) -> bool:
    """Whether a process of this machine has been killed, or is gone: known before it has given back its memory, which is when its parent hears of it."""
    try:
        status, stat = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "stat"))
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigPnd:"))
    # Fields after the program's name: state, five numbers, the kernel's flags.
    flags = int(stat.rpartition(")")[2].split()[6])
    return bool(pending & 1 << (signal.SIGKILL - 1) or flags & EXITING)


def first_line(error: Exception) -> str:
    """An error in one line; Ray's carry whole tracebacks, and what was raised inside an actor."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
