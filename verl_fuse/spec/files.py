"""Text files in and out.

Invariants (tests/unit/spec/test_text_files.py):
- a reader never sees half a file: it is written beside its place and renamed, and nothing stays behind when that fails;
- an error in a file's content names the file;
- where a file could not be written, that can be known before there is anything to write.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from verl_fuse.errors import FuseError

T = TypeVar("T")


def load(path: Path, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the text of `path`; a FuseError names the file."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FuseError(f"{path}: cannot be read: {error}") from error
    except FuseError as error:
        raise FuseError(f"{path}: {error}") from error


def save(path: Path, text: str) -> None:
    """`write_atomically`, where a file that cannot be written is a FuseError that names it."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise FuseError(f"{path}: cannot be written: {error}") from error


def check_writable(path: Path) -> None:
    """Raise a FuseError where `save` would: to be called before work that takes long and ends in this file."""
    try:
        if path.is_dir():
            raise FuseError(f"{path}: cannot be written: it is a folder")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise FuseError(f"{path}: cannot be written: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, then rename. Raises OSError where the disk refuses."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink()
        raise
