"""Handles Ctrl-C: while modules are imported, Ctrl-C ends the process at once; later it raises KeyboardInterrupt, and a
second Ctrl-C ends the process.

An import that is interrupted by an exception leaves a traceback, or half a module behind. This module imports
the standard library alone.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CODE = 128 + signal.SIGINT
MESSAGE = "verl-fuse: interrupted"
_Handler = Callable[[int, FrameType | None], None]


def end_now(number: int, frame: FrameType | None) -> None:
    """End this process without running any more of its code."""
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(CODE)


def raise_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; the next Ctrl-C ends the process."""
    signal.signal(signal.SIGINT, end_now)
    raise KeyboardInterrupt


@contextmanager
def on_interrupt(handler: _Handler) -> Iterator[None]:
    """Let `handler` answer Ctrl-C inside the block. A SIGINT that is ignored (nohup) stays ignored; only the main
    thread can be interrupted."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def happened() -> bool:
    """Tell whether `raise_once` has raised; a command that answers Ctrl-C itself (`run`) prints its own message."""
    return signal.getsignal(signal.SIGINT) is end_now
