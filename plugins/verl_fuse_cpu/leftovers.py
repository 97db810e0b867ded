"""Find and remove weight buffers that killed runs left in /dev/shm.

A buffer is a leftover only if nobody can still be using the buffer: its owner is this user, no living process has the
buffer open or mapped, and no process anywhere, in this container or another container that shares /dev/shm, holds the
lock that senders on the cpu platform take (verl_fuse_patches.weight_buffer_lock).
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# verl names a sender's buffer by this pattern (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py).
PATTERN = "verl_weights_*"


def leftovers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Return the buffers of dead runs in `directory`, sorted; a buffer that might be in use is never among them."""
    own = [path for path in sorted(directory.glob(PATTERN)) if _is_own_file(path)]
    if not own:
        return []
    in_use = set(_files_in_use())
    return [path for path in own if str(path) not in in_use and not _is_locked(path)]


def remove_leftovers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the buffers that `leftovers` finds, and return them."""
    found = leftovers(directory)
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_file() and not path.is_symlink() and status.st_uid == os.getuid()


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        # Somebody holds the lock, or the owner removed the file in the meantime.
        return True
    return False


def _files_in_use() -> Iterator[str]:
    """Yield the paths that living processes of this user have open or mapped; processes of another user cannot open
    files of this user."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for line in (process / "maps").read_text().splitlines():
                # address perms offset dev inode path
                fields = line.split(maxsplit=5)
                if len(fields) == 6:
                    yield fields[5]
            for descriptor in (process / "fd").iterdir():
                yield os.readlink(descriptor)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # The process has ended, or belongs to another user.
            continue
