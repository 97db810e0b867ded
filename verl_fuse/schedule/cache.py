"""Keeps solved schedules on disk, one file per problem and method.

Invariants (tests/unit/schedule/test_cache.py):
- an entry is written to a temporary file and renamed, and validated when read;
- an entry that cannot be read or written is ignored with a warning: no solved schedule is lost for it;
- a worse schedule never replaces a better one.
"""

import os
import warnings
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.schedule.validate import validate
from verl_fuse.spec.problem import ScheduleProblem
from verl_fuse.spec.schedule import Schedule

CACHE_VARIABLE = "VERL_FUSE_CACHE"


def default_folder() -> Path:
    """Return `$VERL_FUSE_CACHE`, else `verl-fuse` in the user's cache directory."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-fuse"


def load(folder: Path, problem: ScheduleProblem, method: str) -> Schedule | None:
    """Return the cached schedule, or None."""
    path = _path(folder, problem, method)
    try:
        if not path.exists():
            return None
        schedule = Schedule.read(path)
        if schedule.problem != problem:
            raise FuseError(f"{path}: holds another problem")
        validate(schedule)
    except (FuseError, OSError) as error:
        warnings.warn(f"cached schedule ignored: {error}", stacklevel=2)
        return None
    return schedule


def store(folder: Path, schedule: Schedule) -> None:
    """Keep the schedule unless a better schedule is already there."""
    kept = load(folder, schedule.problem, schedule.method)
    if kept is not None and (kept.makespan, kept.peak_memory) < (schedule.makespan, schedule.peak_memory):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        schedule.write(_path(folder, schedule.problem, schedule.method))
    except (FuseError, OSError) as error:
        warnings.warn(f"schedule not cached: {error}", stacklevel=2)


def _path(folder: Path, problem: ScheduleProblem, method: str) -> Path:
    return folder / f"schedule-{problem.digest[:32]}-{method}.json"
