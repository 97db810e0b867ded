"""Writes steps in the background: a page of ten thousand spans takes half a second, which the
next step need not wait for.

Invariants (tests/contracts/test_observe.py):
- steps are written one after the other, in order, at most one being behind the training;
- what cannot be written is said and counted; any other fault reaches the driver at the next step;
- after `settle` everything handed over is on disk or counted.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.files import TIMELINE_FOLDER


class StepWriter:
    """Calls `record(timeline)` on a thread of its own; `run_dir` is named in the message about a step
    that could not be written."""

    def __init__(self, run_dir: Path, record: Callable[[Timeline], object]):
        self._run_dir = run_dir
        self._record = record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-fuse timeline")
        self._behind: Future[bool] | None = None
        self._failures = 0

    def write(self, timeline: Timeline) -> None:
        """Hand over one step, once the one before it is done."""
        self.settle()
        self._behind = self._thread.submit(self._written, timeline)

    def settle(self) -> int:
        """Wait for the step being written; how many steps could not be written so far."""
        if self._behind is not None:
            behind, self._behind = self._behind, None
            self._failures += not behind.result()
        return self._failures

    def _written(self, timeline: Timeline) -> bool:
        try:
            self._record(timeline)
        except OSError as error:
            print(
                f"verl-fuse: timeline of step {timeline.step} not written to {self._run_dir / TIMELINE_FOLDER}: "
                f"{error}",
                flush=True,
            )
            return False
        return True
