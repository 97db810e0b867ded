"""Tells why samples are missing: the errors of agent loops, which verl logs where the agent loop runs.

verl logs the error of a session that leaves no sample (agent_loop_tq.py `_run_prompt`), and only then marks the
prompt's group as failed. So the driver, which waits for all groups, finds every error of a rollout that has ended.

Invariants (tests/unit/host/test_agent_errors.py, tests/integration/test_routing.py):
- one warning counts every error and has the text of the error that came first in any process;
- a process that is dead costs the step nothing, and is named.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from verl_fuse.host.rollout.agents import AGENT_LOOP_WORKERS, asked

# Agent-loop workers, which have nothing else to do between two rollouts, may take this many seconds to answer.
ERRORS_SECONDS = 10.0
# An error's text is shown up to this many characters.
MOST_CHARACTERS = 300

logger = logging.getLogger(__name__)


class Errors(NamedTuple):
    """So many errors; the first came at `time` (Unix seconds)."""

    count: int = 0
    time: float = math.inf
    first: str = ""


class AgentErrors:
    """The errors of the agent loops of `agent_loop_manager`, whose workers may take `timeout` seconds to begin; a
    manager without verl's workers has none to tell."""

    def __init__(self, agent_loop_manager: Any, timeout: float):
        self._manager = agent_loop_manager
        for begun in asked(agent_loop_manager, keep_errors, timeout):
            ray.get(begun)

    def warn(self, of: str, missing: int = 0) -> None:
        """Warn of the errors since the last call, and of the samples that are `missing` in the rollout `of`."""
        found = [_answer(answer) for answer in asked(self._manager, take_errors, ERRORS_SECONDS)]
        if missing or any(errors.count for errors in found):
            logger.warning("%s: %s", of, sentence(found, missing))


def sentence(found: Sequence[Errors], missing: int) -> str:
    """Return a sentence on the errors of all processes, and on the samples that are `missing`."""
    lost = f"{missing} samples are missing and are not trained on; " if missing else ""
    count = sum(errors.count for errors in found)
    if not count:
        return lost + ("agent loops logged no error" if found else "agent loops were not asked")
    first = min((errors for errors in found if errors.count), key=lambda errors: errors.time).first
    return f"{lost}agent loops failed: {first}" + (f" (and {count - 1} more)" if count > 1 else "")


class KeptErrors(logging.Handler):
    """A handler that counts what verl's agent loops log as a warning or worse, and keeps the first text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors = Errors()

    def emit(self, record: logging.LogRecord) -> None:
        seen = self.errors
        try:
            first = seen.first if seen.count else described(record)
        except Exception as error:  # noqa: BLE001  An agent's error may have no text.
            first = f"an error without a text ({type(error).__name__})"
        self.errors = Errors(seen.count + 1, min(seen.time, record.created), first)

    def take(self) -> Errors:
        """Return the errors since the last call."""
        taken, self.errors = self.errors, Errors()
        return taken


def described(record: logging.LogRecord) -> str:
    """Return the error of a record, or its message where it has none, in one line."""
    error = record.exc_info[1] if record.exc_info else None
    # The error that a process raised, where another process logs it.
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = record.getMessage() if cause is None else f"{type(cause).__name__}: {cause}"
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"


def keep_errors(_worker: Any) -> None:
    """Keep the errors that verl logs in this process from now on. Runs inside an agent-loop worker."""
    if _kept() is None:
        logging.getLogger(AGENT_LOOP_WORKERS).addHandler(KeptErrors())


def take_errors(_worker: Any) -> Errors:
    """Return the errors since the last call. Runs inside an agent-loop worker."""
    kept = _kept()
    return Errors() if kept is None else kept.take()


def _kept() -> KeptErrors | None:
    handlers = logging.getLogger(AGENT_LOOP_WORKERS).handlers
    return next((handler for handler in handlers if isinstance(handler, KeptErrors)), None)


def _answer(answer: Any) -> Errors:
    try:
        return ray.get(answer)
    except RayError as error:
        return Errors(1, first=f"an agent-loop worker is lost: {str(error).splitlines()[0]}")
