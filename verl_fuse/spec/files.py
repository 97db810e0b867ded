"""Reads text files, and writes files.

Invariants (tests/unit/spec/test_text_files.py):
- a reader never sees half a file: a file is written beside its place and renamed, and no file stays behind when that
fails;
- an error in a file's content names the file, and so does a file too large or too deeply nested to be read;
- a check before the work tells whether a file can be written;
- neither a link nor a device or a pipe is replaced by a file.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from verl_fuse.errors import FuseError

T = TypeVar("T")
# In bytes. The largest known file, a recorded step of thousands of requests, has some tens of millions.
MOST_FILE_BYTES = 2**28


def reason(error: OSError) -> str:
    """Return the system's reason, without the path: the message names the path, and the path in the error may be a
    temporary path."""
    return error.strerror or str(error)


def read_text(path: Path, largest: int = MOST_FILE_BYTES) -> str:
    """Return the text of a file; a FuseError names a file that cannot be read or has more than `largest` bytes (a
    device has no end)."""
    try:
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise FuseError(f"{path}: cannot be read: {reason(error)}") from error
    if len(content) > largest:
        raise FuseError(f"{path}: cannot be read: it has more than {largest} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FuseError(f"{path}: cannot be read: not UTF-8: {error.reason} at byte {error.start}") from error


def load(path: Path, parse: Callable[[str], T]) -> T:
    """Return the result of `parse` on the text of `path`; a FuseError names the file."""
    text = read_text(path)
    try:
        return parse(text)
    except FuseError as error:
        raise FuseError(f"{path}: {error}") from error
    except RecursionError as error:
        raise FuseError(f"{path}: cannot be read: nested too deeply") from error
    except ValueError as error:
        # Text that is no number, or JSON with a number of thousands of digits.
        raise FuseError(f"{path}: cannot be read: {error}") from error


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; a FuseError names a file that has none."""
    found = load(path, json.loads)
    if not isinstance(found, dict):
        raise FuseError(f"{path}: {found!r:.100}; needs a JSON object")
    return found


def save(path: Path, content: str | bytes) -> None:
    """Call `write_atomically`; a FuseError names a file that cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise FuseError(f"{path}: cannot be written: {reason(error)}") from error


def check_writable(path: Path) -> None:
    """Raise a FuseError where `save` would; called before long work that ends in this file."""
    try:
        if path.is_dir():
            raise FuseError(f"{path}: cannot be written: it is a folder")
        if path.exists() and not path.is_file():
            if not os.access(path, os.W_OK):
                raise FuseError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")
            return
        real = Path(os.path.realpath(path))
        with tempfile.NamedTemporaryFile(dir=real.parent, prefix=f".{real.name}."):
            pass
    except OSError as error:
        raise FuseError(f"{path}: cannot be written: {reason(error)}") from error


def check_folder(path: Path) -> None:
    """Raise a FuseError where no file could be made in folder `path`, which need not exist; the check makes no file."""
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    try:
        with tempfile.NamedTemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise FuseError(f"{path}: cannot be written: {reason(error)}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside `path`, then rename; a link stays, and so do devices and pipes, which are written to. Raises OSError
    where the disk refuses."""
    if isinstance(content, str):
        content = content.encode()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink()
        raise
