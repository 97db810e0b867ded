"""Runs a child process in a process group of its own, passes signals on and leaves no process behind.

Ray and vLLM start processes in sessions of their own. All inherit RUN_ID_VARIABLE, so a process of the run that is
still alive after its driver has ended is found by the variable, through /proc.

Invariants (tests/unit/recipes/test_child.py):
- SIGINT, SIGTERM and SIGHUP reach the child, even where they are ignored here; a second signal ends the child at once;
- the child's output goes to `output`, or to this process's own output;
- a child that takes longer than `limit` is told to end, and ended at once where it does not;
- no process that inherited the mark is alive afterwards, whether or not stderr can be written.
"""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

RUN_ID_VARIABLE = "VERL_FUSE_RUN_ID"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The processes of a run get this many seconds to end by themselves, and as many after SIGTERM.
TERMINATE_SECONDS = 10.0
# The kernel gets this many seconds to end a process that has large memory.
KILL_SECONDS = 5.0
# Seconds between two looks at the child.
POLL = 0.2


@dataclass(frozen=True)
class Ending:
    """The end of the child: its exit code (128 + the number of the signal that ended the child), the signal that was
    passed on to the child, if any, and whether it took longer than its limit."""

    code: int
    stopped_by: signal.Signals | None
    late: bool = False


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    poll: Callable[[], None] = lambda: None,
    limit: float = math.inf,
) -> Ending:
    """Run `command` to its end; both its streams go to `output`. `poll` is called every POLL seconds, `limit` is in
    seconds."""
    run_id, deadline = uuid.uuid4().hex, time.monotonic() + limit
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            _send(child, number, first=len(received) == 1)

    # Before the child starts: a signal that is ignored here (SIGINT under nohup) would be ignored by the child as well.
    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    said, late = False, 0
    try:
        child = subprocess.Popen(
            command,
            env={**environment, RUN_ID_VARIABLE: run_id},
            process_group=0,
            stdout=output,
            stderr=output and subprocess.STDOUT,
        )
        for index, number in enumerate(tuple(received)):
            _send(child, number, first=index == 0)
        while (code := _ended(child)) is None:
            poll()
            if time.monotonic() >= deadline:
                late, deadline = late + 1, deadline + TERMINATE_SECONDS
                _send(child, signal.SIGTERM, first=late == 1)
            if received and not said:
                name = signal.Signals(received[0]).name
                _say(f"{name}: the run is being stopped; a second signal ends it at once")
                said = True
    finally:
        try:
            # A second signal answers the waiting: nothing is waited for then.
            end_processes(run_id, patient=lambda: len(received) < 2)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    return Ending(code if code >= 0 else 128 - code, signal.Signals(received[0]) if received else None, late > 0)


def _send(child: subprocess.Popen[bytes], number: int, *, first: bool) -> None:
    if child.poll() is None:
        os.killpg(child.pid, number if first else signal.SIGKILL)


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(POLL)
    except subprocess.TimeoutExpired:
        return None


def end_processes(run_id: str, *, patient: Callable[[], bool] = lambda: True) -> None:
    """Wait for the processes of the run, then end the remaining processes: SIGTERM, then SIGKILL; once nobody is
    `patient` any more, SIGKILL at once."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        if _gone_within(run_id, TERMINATE_SECONDS, patient):
            return
        number = wanted if patient() else signal.SIGKILL
        for pid in processes(run_id):
            # It may have ended by itself between being listed and being signalled.
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            _say(f"process {pid} outlived the run: {number.name}")
        if number is signal.SIGKILL:
            _gone_within(run_id, KILL_SECONDS, lambda: True)
            return


def _say(text: str) -> None:
    # Where stderr is gone (`2>&1 | tee`, a closed terminal) nobody is left to read it.
    with suppress(OSError):
        print(f"verl-fuse: {text}", file=sys.stderr, flush=True)


def processes(run_id: str) -> Iterator[int]:
    """Yield the pids of this user's living processes that inherited the run's mark."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            # The process ended in the meantime, or belongs to another user.
            continue


def _gone_within(run_id: str, seconds: float, patient: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while any(True for _ in processes(run_id)):
        if time.monotonic() > deadline or not patient():
            return False
        time.sleep(0.2)
    return True
