"""Runs a thread of every rank that shows that the process lives, and ends the process when it cannot end by itself.

A rank that is stuck inside an op never looks for a verdict; no exception reaches it there. When a verdict stands
and the program's thread does not come back, the process ends with `EXIT_CODE`: soon if the verdict names this
rank, else after the timeout.
"""

import faulthandler
import os
import sys
import threading
import time

import torch.distributed as dist

from verl_fuse.runtime.blame import Verdict
from verl_fuse.runtime.store import Store

TICK_SECONDS = 0.25
# A process without a tick for this long is called silent.
SILENCE_SECONDS = 5.0
# A culprit gets this many seconds to end by itself.
GRACE_SECONDS = 1.0
EXIT_CODE = 70


class Guard:
    """A guard that ticks under the store key `pulse` and looks for a verdict under `verdict`."""

    def __init__(self, store: Store, pulse: str, verdict: str, rank: int, timeout: float) -> None:
        self._store = store.clone()  # a store serves one thread at a time
        self._pulse = pulse
        self._verdict = verdict
        self._rank = rank
        self._timeout = timeout
        self._running = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-fuse guard", daemon=True)
        self._thread.start()

    def running(self, running: bool) -> None:
        """Set whether a program runs, so that its thread may be stuck."""
        self._running = running

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        beats, deadline = 0, None
        while not self._closed.wait(TICK_SECONDS):
            beats += 1
            verdict = self._look(beats)
            if verdict is None or not self._running:
                deadline = None
            elif deadline is None:
                grace = min(GRACE_SECONDS, self._timeout) if self._rank in verdict.culprits else self._timeout
                deadline = time.monotonic() + grace
            elif time.monotonic() > deadline:
                self._end(verdict)

    def _look(self, beats: int) -> Verdict | None:
        """Tick, then look for a verdict."""
        try:
            self._store.set(self._pulse, str(beats))
            return Verdict.from_json(self._store.get(self._verdict)) if self._store.check([self._verdict]) else None
        except dist.DistError as error:
            return Verdict((), f"the store is gone: {error}")

    def _end(self, verdict: Verdict) -> None:
        print(f"verl-fuse: rank {self._rank} ends, it is stuck in a program: {verdict.text}", file=sys.stderr)
        faulthandler.dump_traceback()
        os._exit(EXIT_CODE)
