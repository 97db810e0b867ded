import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("ray")

from verl_fuse.host.upstream.death import is_dying

# Holds memory, which the kernel takes a while to free.
SLEEPS = "import sys, time; held = bytearray(200 << 20); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    yield child
    child.kill()
    child.communicate()


def test_a_killed_process_is_dying_from_the_moment_of_the_signal_on(process):
    assert not any(is_dying(process.pid) for _ in range(100))
    os.kill(process.pid, signal.SIGKILL)
    looks = [is_dying(process.pid) for _ in range(500)]
    assert all(looks)
    process.wait()
    assert is_dying(process.pid), "gone"


def test_one_that_stands_still_is_not_dying(process):
    os.kill(process.pid, signal.SIGSTOP)
    assert not is_dying(process.pid)
