"""Ends every command: its exit code, and one line on stderr where the command failed.

| code | |
|---|---|
| 0 | done |
| 1 | done, and the examined subject is at fault (`doctor`) |
| 2 | refused: the line names the key or file, the value and what is allowed |
| 130 | interrupted |
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from verl_fuse.cli import interrupt
from verl_fuse.errors import FuseError

REFUSED = 2
# Typer brings its own copy of click, or depends on click, according to its version.
ClickException: Any = typer.BadParameter.__mro__[2]
# A write to stdout fails with these errors: its disk is full or gone, a limit is reached, nobody reads.
OF_STDOUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)
# The machine refuses a file, whatever the command does.
OF_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Nobody is left to read a message where a reader such as `head` has gone away.
CLOSED_PIPE = 1


def run(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code; a fault of its input, or of stdout, is one line on stderr."""
    with interrupt.on_interrupt(interrupt.raise_once), _plain_warnings():
        try:
            code = command()
            sys.stdout.flush()
        except FuseError as error:
            return _refused(str(error))
        except ClickException as error:
            return _misused(error)
        except (KeyboardInterrupt, typer.Abort):
            code = interrupt.CODE
        except MemoryError:
            return _refused("out of memory: a smaller workload, cluster or problem would do")
        except OSError as error:
            if error.filename is not None and error.errno in OF_FILES:
                return _refused(f"{error.filename}: {error.strerror}")
            if error.errno not in OF_STDOUT or error.filename is not None:
                raise
            return _closed(error)
        if code == interrupt.CODE and interrupt.happened():
            print(interrupt.MESSAGE, file=sys.stderr, flush=True)
    return code if isinstance(code, int) else 0


def _refused(message: str) -> int:
    print(f"verl-fuse: {message}", file=sys.stderr, flush=True)
    return REFUSED


def _misused(error: Any) -> int:
    """Refuse arguments that the command does not take."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return REFUSED
    context = getattr(error, "ctx", None)
    where = f" ({context.command_path} -h lists what there is)" if context else ""
    return _refused(" ".join(error.format_message().split()) + where)


def _closed(error: OSError) -> int:
    """End where stdout cannot be written. The rest of its buffer goes nowhere, or Python would complain once more when
    it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return CLOSED_PIPE if error.errno == errno.EPIPE else _refused(f"stdout cannot be written: {error.strerror}")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as one line each, without the place in the source that warns."""
    previous = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"verl-fuse: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = previous
