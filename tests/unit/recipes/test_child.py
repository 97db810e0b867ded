import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_fuse.cli import child

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def start(code: str) -> int:
    return child.run([sys.executable, "-c", code], dict(os.environ))


def test_the_exit_code_is_the_childs():
    assert start("raise SystemExit(7)") == 7


def test_a_child_that_a_signal_ends_gives_128_plus_its_number():
    assert start("import os; os.kill(os.getpid(), 9)") == 137


def test_signals_reach_the_child(tmp_path):
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    # Another test of this process may have started Ray, which handles SIGTERM itself.
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert start(code) == 5
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_outlives_the_child_in_a_session_of_its_own_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(child, "GRACE", 0.3)
    pid_file = tmp_path / "pid"
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"""
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", {sleeper!r}], start_new_session=True)
pathlib.Path({str(pid_file)!r}).write_text(str(other.pid))
time.sleep(0.5)
"""
    assert start(code) == 0
    pid = int(pid_file.read_text())
    assert f"process {pid} outlived the run: SIGTERM" in capsys.readouterr().err
    time.sleep(0.2)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_interrupt_reaches_the_child_even_where_interrupts_are_ignored(tmp_path):
    ready = tmp_path / "ready"
    code = f"""
import pathlib, time
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert start(code) == 128 + signal.SIGINT
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
