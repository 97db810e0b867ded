"""Chooses the lines of a growing log that the screen shows: phases of the start, a line per step, and problems.

verl's driver prints its own lines and, as Ray forwards them, the lines of every process behind "(Name pid=123)". These
lines are shown:

- lines that verl-fuse printed (they begin with "verl-fuse: "), but not lines about a step that is under way, nor the
line that names the timeline;
- warnings and errors that verl-fuse logged (verl_fuse/host/record/logs.py marks them);
- verl's own line for a step where verl-fuse has shown none: stock verl, or fuse.observe.progress=false;
- the first of each of verl's lines that tell the progress of the start (PHASES; tests/unit/recipes/test_screen.py
  finds them in verl's source).
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from verl_fuse.host.names import LOG_PREFIX

# Text of verl (trainer/main_ppo.py, trainer/ppo/v1/trainer_base.py) -> the phase that begins once the text is printed.
PHASES = {
    "ray init kwargs": "Ray starts",
    "worker group kwargs": "training workers start",
    "create worker group": "models are loaded",
    "actor and ref model engine initialized": "rollout replicas start",
    "all initialize finished, ready to fit": "weights go to the replicas",
    "Initial validation metrics": "validated, training begins",
}
TOTAL = "Total training steps: "

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SOURCE = re.compile(r"^\((\S[^()]* pid=\d+[^()]*)\) ?")
_LOGGED = re.compile(rf"^(WARNING|ERROR|CRITICAL):[^:]*:\d\d:\d\d,\d+:{LOG_PREFIX}(.*)$")
_STEP_DONE = re.compile(r"^step (\d+)/\d+ done")
_STEP_UNDER_WAY = re.compile(r"^step \d+/\d+ at ")
_VERL_STEP = re.compile(r"^step:(\d+) - .*\btiming_s/step:([0-9.eE+-]+)")
# The run's summary names the page.
_SAID_AT_THE_END = "timeline of every step: "
# The time left is judged by this many steps, like the time in the line of verl-fuse.
_RECENT_STEPS = 10


class Screen:
    """Chooses lines; remembers which phases and steps have been shown."""

    def __init__(self) -> None:
        self._phases = dict(PHASES)
        self._total: int | None = None
        self._steps: set[int] = set()
        self._seconds: list[float] = []
        # The source of the line before, if that line was shown: a list follows on lines of its own.
        self._shown: str | None = None

    def shows(self, line: str) -> str | None:
        """Return the shown part of a line of the log, None for nothing."""
        source, text = split(line)
        if self._shown == source and text.startswith("  - "):
            return text
        found = self._chosen(text)
        self._shown = source if found is not None else None
        return found

    def _chosen(self, text: str) -> str | None:
        if text.startswith(LOG_PREFIX):
            return self._own(text.removeprefix(LOG_PREFIX))
        if logged := _LOGGED.match(text):
            return f"{LOG_PREFIX}{logged[1].lower()}: {logged[2]}"
        if step := _VERL_STEP.match(text):
            return self._stock_step(int(step[1]), float(step[2]))
        if TOTAL in text:
            digits = text.partition(TOTAL)[2].strip()
            self._total = int(digits) if digits.isdigit() else None
        for pattern, phase in self._phases.items():
            if pattern in text:
                del self._phases[pattern]
                return f"{LOG_PREFIX}{phase}"
        return None

    def _own(self, text: str) -> str | None:
        if _STEP_UNDER_WAY.match(text) or text.startswith(_SAID_AT_THE_END):
            return None
        if done := _STEP_DONE.match(text):
            self._steps.add(int(done[1]))
        return LOG_PREFIX + text

    def _stock_step(self, step: int, seconds: float) -> str | None:
        if step in self._steps:
            return None
        self._steps.add(step)
        self._seconds.append(seconds)
        if self._total is None:
            return f"{LOG_PREFIX}step {step} done in {seconds:.1f} s"
        left = statistics.median(self._seconds[-_RECENT_STEPS:]) * (self._total - step)
        eta = f"ETA {clock(left)}" if left > 0 else "last step"
        return f"{LOG_PREFIX}step {step}/{self._total} done in {seconds:.1f} s, {eta}"


class Tail:
    """Shows a growing log through `say`, each line with the time since the start."""

    def __init__(self, log: Path, say: Callable[[str], None]):
        self._file = log.open("rb")
        self._say = say
        self._screen = Screen()
        self._begin = time.monotonic()
        self._rest = b""

    def read(self) -> None:
        """Show the lines written since the last call; an incomplete line waits."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            shown = self._screen.shows(line.decode(errors="replace").rstrip("\r"))
            if shown is not None:
                self._say(
                    f"[{clock(time.monotonic() - self._begin):>6}] {shown}" if shown.startswith(LOG_PREFIX) else shown
                )

    def close(self) -> None:
        self.read()
        self._file.close()


def split(line: str) -> tuple[str, str]:
    """Return (who printed the line, the text) of a line of the log, without colours; the driver is ""."""
    plain = _COLOUR.sub("", line)
    found = _SOURCE.match(plain)
    return (found[1], plain[found.end() :]) if found else ("", plain)


def clock(seconds: float) -> str:
    """Return seconds as "7 s", "3:05" or "2:03:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def last_lines(log: Path, most: int, size: int = 1 << 16) -> Iterator[str]:
    """Yield the last lines of a log that are not blank, without colours."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        lines = [_COLOUR.sub("", line).rstrip() for line in file.read().decode(errors="replace").splitlines()]
    yield from [line for line in lines if line][-most:]
