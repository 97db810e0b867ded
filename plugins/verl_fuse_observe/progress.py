"""Make the progress line of plain text, which survives Ray's log forwarding.

Invariants (tests/contracts/test_observe.py):
- at most one line per `interval` seconds during a step, plus one at its end;
- the ETA is the median of the last steps' wall-clock times (from one step's end to the next) times the steps left.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from verl_fuse.spec.step import RolloutView
from verl_fuse.spec.timeline import ADVANTAGE, GENERATION

# So many steps are enough to see past a step with validation or a checkpoint, and few enough to follow responses that
# grow longer.
_RECENT_STEPS = 10


class StepProgress:
    """Turn events into lines; a method returns None where no line is due."""

    def __init__(self, total_steps: int, expected: int, groups: int, interval: float):
        self._total_steps = total_steps
        self._expected = expected
        self._groups = groups
        self._interval = interval
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_start = 0.0
        self._last_end: float | None = None
        self._last_line = 0.0
        # Inference has been given so many samples in this step.
        self._scored = 0
        # (groups with a sample, samples, samples that failed) of this step's batch, once all samples are generated.
        self._batch = (groups, expected, 0)

    def step_begin(self, time: float) -> None:
        self._step_start = self._last_line = time
        self._scored = 0
        self._batch = (self._groups, self._expected, 0)

    def generated(self, responses: Mapping[str, Sequence[int]], missing: int) -> None:
        """Take in the samples that the step trains on, by prompt, and how many of those asked for it lacks."""
        self._batch = (len(responses), sum(map(len, responses.values())), missing)

    def poll(self, step: int, time: float, view: RolloutView) -> str | None:
        """Return a line about a rollout that is under way."""
        # A sample of several trajectories waits with all of them.
        self._scored = view.finished - len({sample.key.rpartition("_")[0] for sample in view.ready})
        groups = max(view.groups, self._groups)
        return self._running(step, time, view.groups_finished, groups, self._scored, view.expected, "generating")

    def stage(self, step: int, time: float, name: str) -> str | None:
        """Return a line about a stage that begins after the rollout."""
        if name == GENERATION:
            return None
        groups, samples, missing = self._batch
        scored = samples if name.startswith((ADVANTAGE, "update", "defer", "save", "test")) else self._scored
        return self._running(step, time, groups, self._groups, scored, samples + missing, name)

    def step_end(self, step: int, time: float, seconds: float, idle: float | None) -> str:
        """Return the line that closes a step."""
        self._durations.append(time - (self._last_end if self._last_end is not None else self._step_start))
        self._last_end = time
        devices = "" if idle is None else f", devices idle {idle:.0%}"
        groups, samples, missing = self._batch
        lost = f", {missing} missing" if missing else ""
        return (
            f"step {step}/{self._total_steps} done in {_clock(seconds)}: {groups}/{self._groups} groups trained "
            f"({samples} samples{lost}){devices}, {self._eta(step, time, step)}"
        )

    def _running(
        self, step: int, time: float, done: int, groups: int, scored: int, expected: int, doing: str
    ) -> str | None:
        if time - self._last_line < self._interval:
            return None
        self._last_line = time
        return (
            f"step {step}/{self._total_steps} at {_clock(time - self._step_start)}, {doing}: {done}/{groups} groups "
            "generated, "
            f"{scored}/{expected} samples scored, 0/{groups} groups trained, {self._eta(step, time, step - 1)}"
        )

    def _eta(self, step: int, time: float, finished: int) -> str:
        left = self._total_steps - finished
        if left <= 0:
            return "last step"
        if not self._durations:
            return "ETA after this step"
        usual = statistics.median(self._durations)
        spent = min(time - self._step_start, usual) if finished < step else 0.0
        return f"ETA {_clock(usual * left - spent)}"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
