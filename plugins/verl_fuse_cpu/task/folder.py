"""Make a task's directory: its files, and manifest.json with the parameters that they follow from.

Invariants (tests/unit/task/test_make.py):
- a directory that holds this task with the same parameters is left alone;
- the directory appears whole or not at all: `make_folder` builds the directory beside its place and renames it;
- one that holds this task with other parameters, and nothing besides, is made anew;
- a directory that holds anything else, or has lost a file, is refused, never overwritten.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load_json, reason

MANIFEST = "manifest.json"
# Every task has these; verl reads them.
PARTS = ("model", "train.parquet", "validation.parquet")


def make_folder(
    out: Path,
    manifest: dict[str, Any],
    build: Callable[[Path], None],
    parts: tuple[str, ...] = PARTS,
) -> bool:
    """Let `build` write `parts` into a new directory that becomes `out`, unless the task with this manifest is there;
    return True if the task was made. Raises a FuseError with the reason why `out` cannot be used or made."""
    existing = read_manifest(out)
    if existing == manifest:
        if missing := [part for part in parts if not (out / part).exists()]:
            raise FuseError(f"{out} has lost {', '.join(missing)}: delete {out} to make it again")
        return False
    if existing is None and out.exists() and any(out.iterdir()):
        raise FuseError(f"{out} holds files but no {MANIFEST} of this task: name an empty or new directory")
    if existing is not None:
        strangers = sorted({path.name for path in out.iterdir()} - {*parts, MANIFEST, "__pycache__"})
        if strangers or existing.keys() != manifest.keys():
            what = f"{strangers[0]}, which is not of this task" if strangers else "another task"
            raise FuseError(f"{out} holds {what}: name an empty or new directory")
    building = out.parent / f".{out.name}-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_half_made(out)
        building.mkdir()
        with _locked(building):
            build(building)
            (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            if out.exists():
                shutil.rmtree(out)
            os.replace(building, out)
    except OSError as error:
        # An error without a number is not the system's: its traceback is needed.
        if error.errno is None:
            raise
        raise FuseError(f"{out} cannot be made: {reason(error)}; nothing was left behind") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest in `out`, None without one; raises FuseError when the manifest cannot be read."""
    path = out / MANIFEST
    if out.exists() and not out.is_dir():
        raise FuseError(f"{out} is a file; a directory is needed")
    if not path.exists():
        return None
    try:
        return load_json(path)
    except FuseError as error:
        raise FuseError(f"{error}: delete {out} to make it again") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; raises BlockingIOError if a process holds it, in this container or another one."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _remove_half_made(out: Path) -> None:
    """Remove what processes that were killed built beside `out`."""
    for path in out.parent.glob(f".{out.name}-*"):
        with suppress(BlockingIOError), _locked(path):
            shutil.rmtree(path)
