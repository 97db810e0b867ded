"""Keeps two commands from working in one folder at the same time.

Invariant (tests/unit/cli/test_locked.py): the lock ends with its process, however that ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_fuse.errors import FuseError

# It has the process that holds a lock on it.
LOCK = "lock"


@contextmanager
def alone(folder: Path, doing: str, elsewhere: str) -> Iterator[None]:
    """Keep other processes out of `folder`, which is made, within the block; a FuseError says that one is `doing`
    something there already, which one, and what names another folder (`elsewhere`)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise FuseError(f"{folder}: cannot be written to: {error.strerror}; {elsewhere}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read() or "not known"
            raise FuseError(
                f"{folder}: {doing} there already (process {holder}): wait until it has ended, or end it; {elsewhere}"
            ) from error
        except OSError as error:
            raise FuseError(f"{folder}: cannot be locked: {error.strerror}; {elsewhere}") from error
        try:
            lock.truncate(0)
            lock.write(f"{os.getpid()} on {socket.gethostname()}")
            lock.flush()
        except OSError as error:
            raise FuseError(f"{folder}: cannot be written to: {error.strerror}; {elsewhere}") from error
        yield
