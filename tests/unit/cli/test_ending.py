"""How commands end: exit codes and what is said."""

import errno
import signal
import warnings

import pytest
import typer

from verl_fuse.cli import ending, interrupt
from verl_fuse.errors import FuseError


def raising(error: BaseException):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (raising(FuseError("prompts=0; needs more")), 2, "verl-fuse: prompts=0; needs more\n"),
        (raising(typer.BadParameter("3 is too much")), 2, "verl-fuse: Invalid value: 3 is too much\n"),
        (raising(PermissionError(errno.EACCES, "Permission denied", "x")), 2, "verl-fuse: x: Permission denied\n"),
        # The disk of a file that a command writes, and not that of stdout.
        (raising(OSError(errno.ENOSPC, "no space left", "x")), 2, "verl-fuse: x: no space left\n"),
        (raising(MemoryError()), 2, "verl-fuse: out of memory: a smaller workload, cluster or problem would do\n"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, "verl-fuse: interrupted\n"),
        # A command that answered Ctrl-C itself.
        (lambda: 130, 130, ""),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], command, code: int, said: str):
    assert ending.run(command) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake of ours"),
        FileNotFoundError(2, "gone", "x"),
        TimeoutError(),
    ],
)
def test_what_nobody_foresaw_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error)):
        ending.run(raising(error))


def test_the_second_ctrl_c_ends_the_process():
    def command():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return signal.getsignal(signal.SIGINT) is interrupt.end_now

    before = signal.getsignal(signal.SIGINT)
    assert ending.run(command) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert ending.run(lambda: signal.raise_signal(signal.SIGINT) or 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)


def test_warnings_are_plain_lines():
    def command():
        return int(
            warnings.formatwarning(UserWarning("a step is skipped"), UserWarning, "x.py", 3)
            == "verl-fuse: a step is skipped\n"
        )

    assert ending.run(command) == 1
