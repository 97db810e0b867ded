"""Prints lines on stderr about work that takes longer than a moment: its name, and its seconds so far.

Invariants (tests/unit/cli/test_progress.py):
- work that ends within PATIENCE seconds prints nothing;
- later each new text is printed, at most one text in the interval, and the last text again while there is no new one.

A thread of its own prints, because the main thread may be compiling or solving.
"""

import sys
import threading
import time
from types import TracebackType

PATIENCE = 2.0
# Seconds between two lines: on a terminal, and in a log.
ON_TERMINAL, IN_LOG = 1.0, 10.0
# Seconds after which a text is printed again.
AGAIN = 10.0


class ProgressNotes:
    """Progress notes of a block; inside the block, call them with a text whenever the work changes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> "ProgressNotes":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        interval = ON_TERMINAL if sys.stderr.isatty() else IN_LOG
        said, at, wait = "", 0.0, PATIENCE
        while not self._over.wait(wait):
            text, now, wait = self.text, time.monotonic(), interval
            if text != said or now - at >= AGAIN:
                print(f"verl-fuse: {now - self._begun:.0f} s: {text}", file=sys.stderr, flush=True)
                said, at = text, now
