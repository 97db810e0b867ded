"""A weight sync whose receiver dies ends at once, names it, and leaves nothing behind for long.

Sender and receiver are verl's own bucketed weight transfer, in two processes, over a real ZeroMQ socket and /dev/shm.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.watchdog import weight_sync_suspects, with_deadline
from verl_fuse_cpu.leftovers import SHARED_MEMORY, leftovers, remove_leftovers

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")]

# Four tensors of 1 MiB through a buffer of 1 MiB: four buckets, each answered by the receiver.
SENDER = """
import asyncio, sys, torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
sender = BucketedWeightSender(sys.argv[1], bucket_size_mb=1, use_shm=True)
init_buffer = sender._init_buffer
def announced():
    init_buffer()
    print("> buffer", sender.shm.name, flush=True)
sender._init_buffer = announced
asyncio.run(sender.async_send_weights((f"layer.{i}", torch.full((1 << 18,), float(i))) for i in range(4)))
print("> sent", flush=True)
"""

RECEIVER = """
import sys, time, torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
sums = []
def load(weights, is_last):
    sums.extend(float(tensor.sum()) for _, tensor in weights)
    print("> bucket", flush=True)
    if sys.argv[2] == "hang" and len(sums) == 2:
        time.sleep(3600)
print("> ready", flush=True)
BucketedWeightReceiver(sys.argv[1], torch.device("cpu"), use_shm=True).receive_weights(load)
print("> received", *sums, flush=True)
"""


class Process:
    """A Python program in a session of its own, so that it can be killed with everything it started."""

    def __init__(self, program: str, *arguments: str, timeout: float = 600.0) -> None:
        environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_fuse_cpu.entry"}
        environment["VERL_FUSE_WEIGHT_SYNC_TIMEOUT"] = str(timeout)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def line(self) -> str:
        """The next line the program itself prints; verl and vLLM print others."""
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError(f"the program ended: {self._popen.communicate()[1]}")

    def end(self, seconds: float = 120.0) -> tuple[int, list[str], str]:
        """Exit code, lines not read yet, and what was written to stderr."""
        out, err = self._popen.communicate(timeout=seconds)
        return self._popen.returncode, [line[2:] for line in out.splitlines() if line.startswith("> ")], err

    def kill(self) -> None:
        """Kill the whole session, Python's resource tracker (which would clean up) included."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.communicate()


@pytest.fixture
def handle(tmp_path: Path) -> str:
    # Unix-domain socket paths are limited to 107 bytes.
    return f"ipc://{os.path.relpath(tmp_path / 's')}"


@pytest.fixture
def start() -> Iterator:
    started: list[Process] = []

    def begin(program: str, *arguments: str, timeout: float = 600.0) -> Process:
        started.append(Process(program, *arguments, timeout=timeout))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def test_a_transfer_that_works_is_not_disturbed(start, handle):
    sender, receiver = start(SENDER, handle), start(RECEIVER, handle, "finish")
    buffer = sender.line().split()[1]
    assert receiver.end()[1] == ["ready", *["bucket"] * 4, "received 0.0 262144.0 524288.0 786432.0"]
    assert sender.end()[:2] == (0, ["sent"])
    assert not (SHARED_MEMORY / buffer).exists()


def test_the_sender_names_a_receiver_that_is_killed(start, handle):
    sender, receiver = start(SENDER, handle, timeout=3600.0), start(RECEIVER, handle, "hang")
    buffer = sender.line().split()[1]
    assert [receiver.line() for _ in range(3)] == ["ready", "bucket", "bucket"]
    receiver.kill()
    code, out, err = sender.end(seconds=60)
    assert (code, out) == (1, [])
    assert f"FuseError: weight sync over {handle}: the vLLM worker (pid {receiver.pid}) closed the connection" in err
    assert not (SHARED_MEMORY / buffer).exists()


def test_the_sender_names_a_receiver_that_does_not_answer(start, handle):
    receiver = start(RECEIVER, handle, "hang")
    assert receiver.line() == "ready"
    code, _, err = start(SENDER, handle, timeout=5.0).end()
    assert code == 1
    assert (
        f"FuseError: weight sync over {handle}: the vLLM worker (pid {receiver.pid}) did not answer within 5 s" in err
    )


def test_the_sender_says_when_nobody_connects(start, handle):
    code, _, err = start(SENDER, handle, timeout=1.0).end()
    assert code == 1
    assert f"FuseError: weight sync over {handle}: no vLLM worker connected within 1 s" in err


def test_the_next_start_removes_the_buffer_of_a_dead_run_and_no_other(start, handle):
    dead, alive = start(SENDER, handle), start(SENDER, handle + "2")
    receiver, other_receiver = start(RECEIVER, handle, "hang"), start(RECEIVER, handle + "2", "hang")
    dead_buffer, alive_buffer = (SHARED_MEMORY / process.line().split()[1] for process in (dead, alive))
    for process in (receiver, other_receiver):
        assert [process.line() for _ in range(3)] == ["ready", "bucket", "bucket"]
    assert not {dead_buffer, alive_buffer} & set(leftovers())
    dead.kill()
    # Its receiver still maps the buffer: in use until it has gone too.
    assert dead_buffer.exists()
    assert dead_buffer not in leftovers()
    receiver.kill()
    assert dead_buffer.exists()
    removed = remove_leftovers()
    assert dead_buffer in removed
    assert alive_buffer not in removed
    assert not dead_buffer.exists()
    assert alive_buffer.exists()
    alive.kill()
    other_receiver.kill()
    assert alive_buffer in remove_leftovers()


@pytest.fixture(scope="module")
def ray_cluster():
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        # Ray leaves files and sockets to the garbage collector.
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        yield ray
        ray.shutdown()


def test_the_driver_names_dead_and_silent_processes(ray_cluster):
    class Worker:
        def __init__(self, errored: bool | None = None) -> None:
            # What vLLM's AsyncLLM says of its engine process; a training worker fronts no engine.
            self.engine = None if errored is None else SimpleNamespace(errored=errored)

        async def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

    remote = ray_cluster.remote(num_cpus=0)(Worker)
    ranks, servers = (
        [remote.remote() for _ in range(2)],
        [remote.remote(False), remote.remote(True), remote.remote(False)],
    )
    manager = SimpleNamespace(
        actor_wg=SimpleNamespace(workers=ranks),
        replicas=[SimpleNamespace(replica_rank=rank, servers=[server]) for rank, server in enumerate(servers)],
    )
    ray_cluster.get([actor.__ray_ready__.remote() for actor in (*ranks, *servers)])
    ranks[1].sleep.remote(3600)
    ray_cluster.kill(servers[2])

    with pytest.raises(FuseError) as caught:
        with_deadline(
            "weight sync of step 3", 0.1, threading.Event().wait, lambda: weight_sync_suspects(manager, seconds=5.0)
        )
    head, _, named = str(caught.value).partition("; waited for: ")
    assert head == "weight sync of step 3 did not finish in 0.1 s"
    assert [name.split(": ")[0] for name in named.split(", ")[:3]] == [
        "replica 1 server (its engine process is dead)",
        "replica 2 server (dead",
        "trainer rank 1 (does not answer)",
    ]
