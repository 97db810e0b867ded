import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_fuse.cli import child

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def start(code: str) -> child.Ending:
    return child.run([sys.executable, "-c", code], dict(os.environ))


def test_the_exit_code_is_the_childs():
    assert start("raise SystemExit(7)") == child.Ending(7, None)


def test_a_child_that_a_signal_ends_gives_128_plus_its_number():
    assert start("import os; os.kill(os.getpid(), 9)") == child.Ending(137, None)


@pytest.mark.parametrize("answer", ["sys.exit(5)", "None"])
def test_a_child_that_takes_too_long_is_told_to_end_and_then_ended(answer, monkeypatch):
    monkeypatch.setattr(child, "TERMINATE_SECONDS", 0.5)
    code = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: {answer})
while True:
    time.sleep(0.1)
"""
    # Long enough for the child to begin on a machine that is busy.
    ending = child.run([sys.executable, "-c", code], dict(os.environ), limit=5.0)
    assert ending == child.Ending(5 if "5" in answer else 137, None, late=True)


def test_a_child_within_its_limit_is_not_late():
    assert child.run([sys.executable, "-c", ""], dict(os.environ), limit=600.0) == child.Ending(0, None)


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
    assert start(code) == child.Ending(5, signal.SIGTERM)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_outlives_the_child_in_a_session_of_its_own_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(child, "TERMINATE_SECONDS", 0.3)
    pid_file = tmp_path / "pid"
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"""
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", {sleeper!r}], start_new_session=True)
pathlib.Path({str(pid_file)!r}).write_text(str(other.pid))
time.sleep(0.5)
"""
    assert start(code).code == 0
    pid = int(pid_file.read_text())
    assert f"process {pid} outlived the run: SIGTERM" in capsys.readouterr().err
    time.sleep(0.2)
    assert is_gone(pid)


OUTLIVES = """
import os, pathlib, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.02)
mark = pathlib.Path({file!r})
mark.with_suffix(".part").write_text(str(os.getpid()))
mark.with_suffix(".part").rename(mark)
time.sleep(60)
"""


def leaves(file: Path) -> str:
    """A program that leaves a process, which writes its pid once the program has ended."""
    code = OUTLIVES.format(file=str(file))
    command = f"[sys.executable, '-c', {code!r}, str(os.getpid())]"
    return f"import os, subprocess, sys; subprocess.Popen({command}, start_new_session=True)"


def is_gone(pid: int) -> bool:
    line = Path(f"/proc/{pid}/cmdline")
    return not line.exists() or not line.read_bytes()


def test_what_outlives_the_child_is_ended_where_nobody_reads_stderr(tmp_path, monkeypatch):
    """As after Ctrl-C of `verl-fuse run NAME 2>&1 | tee log`."""

    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(child, "TERMINATE_SECONDS", 0.3)
    code = f"""
import pathlib, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(other.pid))
"""
    assert start(code).code == 0
    time.sleep(0.2)
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_what_outlives_the_child_at_once(tmp_path, signalled_twice):
    """The processes of a run that is over are waited for, as long as nobody has asked twice."""
    file = tmp_path / "pid"

    thread = signalled_twice(file, signal.SIGINT)
    begun = time.monotonic()
    ending = start(leaves(file))
    thread.join()
    assert (ending.code, ending.stopped_by) == (0, signal.SIGINT)
    assert time.monotonic() - begun < child.TERMINATE_SECONDS
    time.sleep(0.2)
    assert is_gone(int(file.read_text()))


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
        assert start(code) == child.Ending(128 + signal.SIGINT, signal.SIGINT)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_came_before_the_child_reaches_it(monkeypatch):
    popen = child.subprocess.Popen

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return popen(*args, **kwargs)

    monkeypatch.setattr(child.subprocess, "Popen", interrupted)
    assert start("import time; time.sleep(60)") == child.Ending(128 + signal.SIGTERM, signal.SIGTERM)


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_processes_are_waited_for_until_a_second_signal(monkeypatch, signals):
    patience = []
    monkeypatch.setattr(child, "end_processes", lambda run_id, *, patient: patience.append(patient()))
    popen = child.subprocess.Popen

    def interrupted(*args, **kwargs):
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        return popen(*args, **kwargs)

    monkeypatch.setattr(child.subprocess, "Popen", interrupted)
    start("")
    assert patience == [signals < 2]


def test_a_second_signal_ends_a_child_that_does_not_stop(tmp_path, capsys, signalled_twice):
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""

    thread = signalled_twice(ready, signal.SIGTERM)
    begun = time.monotonic()
    assert start(code) == child.Ending(128 + signal.SIGKILL, signal.SIGTERM)
    thread.join()
    assert time.monotonic() - begun < 30
    assert capsys.readouterr().err.count("SIGTERM: the run is being stopped; a second signal ends it at once") == 1


def test_both_streams_go_to_the_output_and_are_looked_at_while_the_child_runs(tmp_path, capfd):
    seen = []
    with (tmp_path / "log").open("wb") as log:
        code = "import sys, time; print('out', flush=True); print('err', file=sys.stderr); time.sleep(1)"
        child.run(
            [sys.executable, "-c", code], dict(os.environ), log, lambda: seen.append((tmp_path / "log").read_text())
        )
    assert "out\nerr\n" in seen
    assert capfd.readouterr() == ("", "")
