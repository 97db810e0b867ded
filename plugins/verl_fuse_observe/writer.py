"""Write steps in the background: a page of ten thousand spans takes half a second, and the next step need not wait for
the page.

Invariants (tests/contracts/test_observe.py):
- steps are written one after the other, in order, at most one being behind the training;
- a step that cannot be written is printed and counted; any other fault reaches the driver at the next step;
- after `settle` everything handed over is on disk or counted.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.files import TIMELINE_FOLDER


class StepWriter:
    """Call `record(timeline)` on a thread of its own; the message about a step that could not be written names
    `run_dir`."""

    def __init__(self, run_dir: Path, record: Callable[[Timeline], object]):
        self._run_dir = run_dir
        self._record = record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-fuse timeline")
        self._behind: Future[bool] | None = None
        self._failures = 0

    def write(self, timeline: Timeline) -> None:
        """Hand over one step, once the step before it is written."""
        self.settle()
        self._behind = self._thread.submit(self._written, timeline)

    def settle(self) -> int:
        """Wait for the step being written, and return how many steps could not be written so far."""
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
