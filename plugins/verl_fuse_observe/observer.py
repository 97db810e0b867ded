"""Follow one run: write each step's timeline and print the progress line.

Invariants (tests/contracts/test_observe.py):
- a run directory that cannot be written is refused at set-up;
- later, a step that cannot be written costs its files, not the training: the failure is printed and counted.
"""

from functools import partial

from verl_fuse.errors import FuseError
from verl_fuse.spec.events import Event, Generated, Polled, SetUp, StageBegun, StepBegun, StepEnded, TrainingEnded
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.files import INDEX_PAGE, prepare, record_step
from verl_fuse.timeline.summary import StepSummary, summarize
from verl_fuse_observe.config import ObserveConfig
from verl_fuse_observe.progress import StepProgress
from verl_fuse_observe.writer import StepWriter


class Observer:
    """Handle the events of the run that `run` has set up."""

    def __init__(self, config: ObserveConfig, run: SetUp):
        self._config, self._run_dir = config, run.run_dir
        self._progress = StepProgress(run.total_steps, run.expected, run.groups, config.progress_interval)
        record = partial(
            record_step, self._run_dir, html=config.html, perfetto=config.perfetto, keep_steps=config.keep_steps
        )
        self._writer = StepWriter(self._run_dir, record)
        self._summary: tuple[Timeline, StepSummary] | None = None
        try:
            prepare(self._run_dir)
        except OSError as error:
            raise FuseError(
                f"fuse.run_dir={str(self._run_dir)!r}: timelines cannot be written there: {error}"
            ) from error

    def observe(self, event: Event) -> None:
        match event:
            case StepBegun(time=time):
                self._progress.step_begin(time)
            case Polled(step=step, time=time, view=view):
                self._say(self._progress.poll(step, time, view))
            case Generated(responses=responses, missing=missing):
                self._progress.generated(responses, missing)
            case StageBegun(step=step, time=time, name=name):
                self._say(self._progress.stage(step, time, name))
            case StepEnded(step=step, time=time, timeline=timeline):
                self._writer.write(timeline)
                length = timeline.end - timeline.start
                self._say(self._progress.step_end(step, time, length, self.summary(timeline).idle_overall))
                self._summary = None
            case TrainingEnded():
                self._writer.settle()
                if self._config.html:
                    self._say(f"timeline of every step: {self._run_dir / INDEX_PAGE}")

    def summary(self, timeline: Timeline) -> StepSummary:
        """Return the summary of a step, which is made once for its metrics and for the line that ends the step."""
        if self._summary is None or self._summary[0] is not timeline:
            self._summary = timeline, summarize(timeline)
        return self._summary[1]

    def write_failures(self) -> int:
        """Return how many steps could not be written so far; wait for the step being written."""
        return self._writer.settle()

    def _say(self, line: str | None) -> None:
        if line is not None and self._config.progress:
            print(f"verl-fuse: {line}", flush=True)
