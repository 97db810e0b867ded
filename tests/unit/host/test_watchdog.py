"""The invariants in the docstring of verl_fuse/host/upstream/watchdog.py."""

import contextvars
import subprocess
import sys
import threading

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream import watchdog
from verl_fuse.host.upstream.watchdog import with_deadline


def nobody() -> list[str]:
    raise AssertionError("no diagnosis is wanted")


@pytest.fixture
def hang():
    """A call that does not return before the test ends."""
    release = threading.Event()
    yield release.wait
    release.set()


def test_what_the_call_returns_reaches_the_caller():
    assert with_deadline("weight sync", 10, lambda: {"bytes": 5}, nobody) == {"bytes": 5}


def test_what_the_call_raises_reaches_the_caller_unchanged():
    error = KeyError("layer 3")

    def call() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        with_deadline("weight sync", 10, call, nobody)
    assert caught.value is error


def test_the_call_sees_the_callers_context():
    step = contextvars.ContextVar("step", default=0)
    step.set(7)
    assert with_deadline("weight sync", 10, step.get, nobody) == 7


def test_past_the_deadline_the_error_names_the_wait_the_seconds_and_the_suspects(hang):
    with pytest.raises(FuseError) as caught:
        with_deadline(
            "weight sync of step 3", 0.05, hang, lambda: ["replica 1 server (dead)", "trainer rank 0 (does not answer)"]
        )
    assert str(caught.value) == (
        "weight sync of step 3 did not finish in 0.05 s; waited for: replica 1 server (dead), trainer rank 0 (does not "
        "answer)"
    )


def test_suspects_are_unknown_when_everybody_answers(hang):
    with pytest.raises(FuseError, match=r"waited for: none that is dead or silent \(every process answers\)"):
        with_deadline("weight sync", 0.05, hang, list)


def test_a_failing_diagnosis_does_not_hide_the_deadline(hang):
    def diagnosis() -> list[str]:
        raise OSError("no route")

    with pytest.raises(FuseError, match=r"did not finish in 0.05 s; .*diagnosis failed: OSError: no route"):
        with_deadline("weight sync", 0.05, hang, diagnosis)


def test_a_hanging_diagnosis_does_not_hide_the_deadline(hang, monkeypatch):
    monkeypatch.setattr(watchdog, "DIAGNOSIS_SECONDS", 0.05)
    with pytest.raises(FuseError, match=r"did not finish in 0.05 s; .*diagnosis did not end"):
        with_deadline("weight sync", 0.05, hang, hang)


def test_an_abandoned_call_keeps_nobody_from_exiting():
    program = (
        "import threading\n"
        "from verl_fuse.host.upstream.watchdog import with_deadline\n"
        "with_deadline('weight sync', 0.05, threading.Event().wait, lambda: ['replica 1'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "FuseError: weight sync did not finish in 0.05 s; waited for: replica 1" in result.stderr
