"""Follows one run: writes each step's timeline and prints the progress line.

Invariants (tests/contracts/test_observe.py):
- a run directory that cannot be written is refused at set-up;
- later, a step that cannot be written costs its files, not the training: it is said and counted.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.step import Event
from verl_fuse.timeline.files import INDEX_PAGE, prepare, record_step
from verl_fuse.timeline.idle import idle_table
from verl_fuse_observe.config import ObserveConfig
from verl_fuse_observe.progress import StepProgress
from verl_fuse_observe.writer import StepWriter


class Observer:
    """Handles the events of one run; `data` is that of the event "setup"."""

    def __init__(self, config: ObserveConfig, run_dir: Path, data: Mapping[str, Any]):
        self._config = config
        self._run_dir = run_dir
        self._progress = StepProgress(data["total_steps"], data["expected"], data["groups"], config.progress_interval)
        record = partial(record_step, run_dir, html=config.html, perfetto=config.perfetto, keep_steps=config.keep_steps)
        self._writer = StepWriter(run_dir, record)
        try:
            prepare(run_dir)
        except OSError as error:
            raise FuseError(f"fuse.run_dir={str(run_dir)!r}: timelines cannot be written there: {error}") from error

    def observe(self, event: Event) -> None:
        if event.kind == "step_begin":
            self._progress.step_begin(event.time)
        elif event.kind == "poll" and event.view is not None:
            self._say(self._progress.poll(event.step, event.time, event.view))
        elif event.kind == "stage":
            self._say(self._progress.stage(event.step, event.time, event.data["name"]))
        elif event.kind == "step_end" and event.timeline is not None:
            self._writer.write(event.timeline)
            seconds, idle = event.timeline.end - event.timeline.start, idle_table(event.timeline).overall
            self._say(self._progress.step_end(event.step, event.time, seconds, idle))
        elif event.kind == "train_end":
            self._writer.settle()
            if self._config.html:
                self._say(f"timeline of every step: {self._run_dir / INDEX_PAGE}")

    def write_failures(self) -> int:
        """How many steps could not be written so far; waits for the one being written."""
        return self._writer.settle()

    def _say(self, line: str | None) -> None:
        if line is not None and self._config.progress:
            print(f"verl-fuse: {line}", flush=True)
