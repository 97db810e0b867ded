"""A child process in a process group of its own, with signals passed on and nothing left behind.

Ray and vLLM start processes in sessions of their own. All inherit the variable MARK, so whatever of the run is still alive after
its driver has ended is found by it, through /proc.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

MARK = "VERL_FUSE_RUN_ID"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds the processes of a run get to end by themselves, and after SIGTERM.
GRACE = 10.0


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to its end and return its exit code, 128 + the signal's number if a signal ended it."""
    run_id = uuid.uuid4().hex
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            os.killpg(child.pid, number)

    # Before the child starts: a signal that is ignored here (SIGINT under nohup) would be ignored by the child as well.
    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        child = subprocess.Popen(command, env={**environment, MARK: run_id}, process_group=0)
        for number in early:
            pass_on(number, None)
        code = child.wait()
    finally:
        end_processes(run_id)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def end_processes(run_id: str) -> None:
    """Wait for the processes of the run, then end those that stay: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _gone_within(run_id, GRACE):
            return
        for pid in processes(run_id):
            print(f"verl-fuse: process {pid} outlived the run: {number.name}", file=sys.stderr, flush=True)
            _signal(pid, number)


def processes(run_id: str) -> Iterator[int]:
    """Pids of this user's living processes that inherited the run's mark."""
    mark = f"{MARK}={run_id}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            # Ended in the meantime, or another user's.
            continue


def _gone_within(run_id: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(True for _ in processes(run_id)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It ended between being listed and being signalled, which is what was wanted.
        return
