"""A weight sync whose receiver dies ends at once, names it, and leaves nothing behind for long.

Sender and receiver are verl's own bucketed weight transfer, in two processes, over a real ZeroMQ socket and /dev/shm.
"""

import asyncio
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.watchdog import weight_sync_suspects, with_deadline
from verl_fuse_cpu.leftovers import SHARED_MEMORY, leftovers, remove_leftovers

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")]

TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"


def send(handle: str, timeout: float, out: Connection) -> None:
    """Four tensors of 1 MiB through a buffer of 1 MiB: four buckets, each answered by the receiver."""
    os.environ["VERL_FUSE_WEIGHT_SYNC_TIMEOUT"] = str(timeout)
    import torch

    sender = importlib.import_module(TRANSFER).BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    init_buffer = sender._init_buffer

    def announced() -> None:
        init_buffer()
        out.send(sender.shm.name)

    sender._init_buffer = announced
    try:
        asyncio.run(sender.async_send_weights((f"layer.{i}", torch.full((1 << 18,), float(i))) for i in range(4)))
    except FuseError as error:
        out.send(str(error))
    else:
        out.send("sent")


def receive(handle: str, hang: bool, out: Connection) -> None:
    """Answers each bucket; stops answering after the second one if told to hang."""
    import torch

    def load(weights: list, is_last: bool) -> None:
        out.send([float(tensor.sum()) for _, tensor in weights])
        if hang and weights[0][0] == "layer.1":
            time.sleep(3600)

    receiver = importlib.import_module(TRANSFER).BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    receiver.receive_weights(load)
    out.send("received")
    # A vLLM worker lives on; a process that ended here could take the last answer with it.
    signal.pause()


def in_cluster(raylet: str, target: Callable[..., None], *arguments: Any) -> None:
    """In a process of the Ray cluster whose raylet has this number."""
    os.environ["RAY_RAYLET_PID"] = raylet
    target(*arguments)


class Process:
    """A forked process that has verl imported already, and the messages it sends."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._out, out = context.Pipe(duplex=False)
        self._process = context.Process(target=target, args=(*arguments, out), daemon=True)
        self._process.start()
        out.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def next(self, seconds: float = 120.0) -> Any:
        assert self._out.poll(seconds), f"process {self.pid} sent nothing within {seconds} s"
        return self._out.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._out.close()


@pytest.fixture(scope="module")
def verl_processes() -> Iterator[None]:
    """Importing verl and vLLM takes many seconds, so a fork server does it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        patch.setenv("VERL_USE_EXTERNAL_PLUGINS", "verl_fuse_cpu")
        multiprocessing.get_context("forkserver").set_forkserver_preload([TRANSFER])
        # There is one server per process: an earlier module's was started in another environment.
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.forkserver.ensure_running()
        yield


@pytest.fixture
def start(verl_processes: None) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(target: Callable[..., None], *arguments: Any) -> Process:
        started.append(Process(target, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def handle(tmp_path: Path) -> str:
    # Unix-domain socket paths are limited to 107 bytes.
    return f"ipc://{os.path.relpath(tmp_path / 's')}"


def test_a_transfer_that_works_is_not_disturbed(start, handle):
    sender, receiver = start(send, handle, 600.0), start(receive, handle, False)
    buffer = sender.next()
    assert [receiver.next() for _ in range(5)] == [[0.0], [262144.0], [524288.0], [786432.0], "received"]
    assert sender.next() == "sent"
    assert not (SHARED_MEMORY / buffer).exists()


def test_two_runs_on_one_host_do_not_get_each_others_weights(start, handle):
    """verl gives the workers of both the same handle: the first job of every cluster has the same number."""
    receiver = start(in_cluster, "1", receive, handle, False)
    other = start(in_cluster, "2", send, handle, 5.0)
    assert "no vLLM worker connected within 5 s" in other.next()
    sender = start(in_cluster, "1", send, handle, 60.0)
    sender.next()
    assert [receiver.next() for _ in range(5)] == [[0.0], [262144.0], [524288.0], [786432.0], "received"]
    assert sender.next() == "sent"


def test_the_sender_names_a_receiver_that_is_killed(start, handle):
    sender, receiver = start(send, handle, 3600.0), start(receive, handle, True)
    buffer = sender.next()
    assert [receiver.next(), receiver.next()] == [[0.0], [262144.0]]
    receiver.kill()
    assert sender.next(seconds=60) == (
        f"weight sync over {handle}: the vLLM worker (pid {receiver.pid}) closed the connection before it had all "
        "weights: "
        "it failed or was killed, see its log"
    )
    assert not (SHARED_MEMORY / buffer).exists()


def test_the_sender_names_a_receiver_that_does_not_answer(start, handle):
    sender, receiver = start(send, handle, 10.0), start(receive, handle, True)
    sender.next()
    assert (
        sender.next() == f"weight sync over {handle}: the vLLM worker (pid {receiver.pid}) did not answer within 10 s"
    )


def test_the_sender_says_when_nobody_connects(start, handle):
    assert start(send, handle, 1.0).next() == f"weight sync over {handle}: no vLLM worker connected within 1 s"


def test_the_next_start_removes_the_buffer_of_a_dead_run_and_no_other(start, handle):
    dead, alive = start(send, handle, 600.0), start(send, handle + "2", 600.0)
    receiver, other_receiver = start(receive, handle, True), start(receive, handle + "2", True)
    dead_buffer, alive_buffer = (SHARED_MEMORY / process.next() for process in (dead, alive))
    for process in (receiver, other_receiver):
        assert [process.next(), process.next()] == [[0.0], [262144.0]]
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

    hung = threading.Event()
    with pytest.raises(FuseError) as caught:
        with_deadline("weight sync of step 3", 0.1, hung.wait, lambda: weight_sync_suspects(manager, seconds=5.0))
    hung.set()
    head, _, named = str(caught.value).partition("; waited for: ")
    assert head == "weight sync of step 3 did not finish in 0.1 s"
    assert [name.split(": ")[0] for name in named.split(", ")[:3]] == [
        "replica 1 server (its engine process is dead)",
        "replica 2 server (dead",
        "trainer rank 1 (does not answer)",
    ]
