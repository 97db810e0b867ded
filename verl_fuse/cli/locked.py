"""Keeps two commands from working in one folder at the same time.

Invariants (tests/unit/recipes/test_execute.py, tests/unit/cli/test_tune_command.py):
- a command that finds another one there is refused, and told which;
- the lock ends with its process, however that ends; what the process started may still be there;
- a file system without locks keeps nobody from working.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_fuse.cli.output import note
from verl_fuse.errors import FuseError

# It has the process that holds a lock on it.
LOCK = "lock"
# What file systems answer that know no locks, or whose lock server is away.
_WITHOUT = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def alone(folder: Path, doing: str, elsewhere: str) -> Iterator[None]:
    """Keep other processes out of `folder`, which is made, within the block; a FuseError says that one is `doing`
    something there already, which one, and what names another folder (`elsewhere`)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise FuseError(f"{folder}: cannot be written to: {error.strerror}; {elsewhere}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, 200).decode(errors="replace") or "not known"
            raise FuseError(
                f"{folder}: {doing} there already (process {holder}): wait until it has ended, or end it; {elsewhere}"
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise FuseError(f"{folder}: cannot be locked: {error.strerror}; {elsewhere}") from error
            without = f"its file system has no locks ({error.strerror})"
            note(f"{folder}: {without}: a second command there would not be noticed")
        try:
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            raise FuseError(f"{folder}: cannot be written to: {error.strerror}; {elsewhere}") from error
        yield
    finally:
        os.close(lock)
