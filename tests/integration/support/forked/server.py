"""Imports what verl's processes import, once, and forks a process for each that asks (site/sitecustomize.py).

    python server.py ADDRESS

Prints a line when it is ready; ends, with all its forks, when its standard input does.
"""

import array
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import setproctitle

MODULES = (
    "ray._private.workers.default_worker",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.experimental.agent_loop",
    "verl_fuse.host.trainer",
    "verl_fuse_interstage.slices.worker",
    "transformers.models.llama.modeling_llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.entrypoints.openai.api_server",
    # What these import on their own, once they run.
    "numba",
    "pydantic.v1",
    "verl_fuse_speculation.prompts",
)
MOST_FILES = 250
# Own files get numbers that no fork's parent has open.
OWN = 900


# The first job of a cluster, the only one of a run.
JOB = "01000000"


class RandomClassID:
    """For actor classes that are defined while modules are imported. Ray's own random numbers must not be drawn before
    a fork, or all forks draw the same: the second of two objects with one id is lost."""

    @staticmethod
    def from_random() -> Any:
        from ray import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def serve(address: str) -> None:
    # Ray reads these two when it is imported, and not again in a fork: the job, and the process
    # with which a worker ends.
    os.environ |= {"RAY_JOB_ID": JOB, "RAY_RAYLET_PID": str(os.getpid())}
    with mock.patch.object(importlib.import_module("ray.actor"), "ActorClassID", RandomClassID):
        for name in MODULES:
            importlib.import_module(name)
    if _drawn_in_fork() == _drawn_in_fork():
        raise RuntimeError(
            f"importing {', '.join(MODULES)} drew one of Ray's random ids: all forks would draw the same"
        )
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    links: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listening, wake, 0], [], [])
        if 0 in readable and not os.read(0, 1024):
            for pid in links:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if wake in readable:
            os.read(wake, 4096)
            for pid, code in _ended(links):
                _tell(links.pop(pid), code)
        if listening in readable:
            link = listening.accept()[0]
            asked, files = _request(link)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for other in (listening, *links.values()):
                    other.close()
                os.close(wake)
                os.close(woken)
                _become(asked, files, link)
            for number in files:
                os.close(number)
            links[pid] = link
            _tell(link, pid)


def _drawn_in_fork() -> bytes:
    """A random id of Ray, drawn in a thread of a fork."""
    reading, writing = os.pipe()
    if not os.fork():
        from ray import WorkerID

        drawing = threading.Thread(target=lambda: os.write(writing, WorkerID.from_random().binary()))
        drawing.start()
        drawing.join()
        os._exit(0)
    os.wait()
    os.close(writing)
    with open(reading, "rb") as found:
        return found.read()


def _ended(links: dict[int, socket.socket]) -> list[tuple[int, int]]:
    found = []
    for pid in list(links):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _tell(link: socket.socket, number: int) -> None:
    try:
        link.sendall(f"{number}\n".encode())
    except BrokenPipeError:
        # The process that asked was killed, and its fork is ending.
        return


def _request(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(4 * MOST_FILES))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    wanted, data = int.from_bytes(size, "big"), b""
    while len(data) < wanted:
        data += link.recv(wanted - len(data))
    return json.loads(data), list(files)


def _become(asked: dict[str, Any], files: list[int], link: socket.socket) -> None:
    """Run the command that was asked for in this fork; never returns."""
    numbers = asked["files"]
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, OWN) for number in files]
    end = fcntl.fcntl(link.fileno(), fcntl.F_DUPFD_CLOEXEC, OWN)
    os.closerange(0, OWN)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted, inheritable=wanted <= 2)
        os.close(number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    if "-c" in asked["argv"]:
        # vLLM's processes have titles, for which the memory is found only while the environment is as it was at first.
        # In Ray's, which have a copy of this module, it would be found twice.
        setproctitle.getproctitle()
    os.environ.clear()
    os.environ.update(asked["environment"])
    argv = _worker(asked["argv"])
    # Ray read its settings, how to authenticate among them, from the environment there was.
    importlib.import_module("ray._raylet").Config.initialize("")
    os.chdir(asked["folder"])
    os.nice(asked["niceness"] - os.nice(0))
    _import_own(os.environ)
    code = 0
    try:
        if "-c" in argv:
            at = argv.index("-c")
            sys.argv = ["-c", *argv[at + 2 :]]
            sys.path.insert(0, "")
            exec(compile(argv[at + 1], "<string>", "exec"), {"__name__": "__main__"})
        elif "-m" in argv:
            at = argv.index("-m")
            sys.argv = argv[at + 1 :]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[at + 1], run_name="__main__", alter_sys=True)
        else:
            at = next(place for place, word in enumerate(argv) if not word.startswith("-"))
            sys.argv = argv[at:]
            sys.path.insert(0, os.path.dirname(argv[at]))
            runpy.run_path(argv[at], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  what an interpreter does at its end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _worker(argv: Sequence[str]) -> Sequence[str]:
    """Return the command that is to be run: of Ray's set-up of a worker, which sets variables, the worker's."""
    at = next((place for place, word in enumerate(argv) if word.endswith("ray/_private/workers/setup_worker.py")), None)
    if at is None:
        return argv
    with mock.patch.object(os, "execvp") as execute, mock.patch.object(sys, "argv", argv[at:]):
        runpy.run_path(argv[at], run_name="__main__")
    # bash -c "exec python default_worker.py ..."
    return shlex.split(execute.call_args.kwargs["args"][2])[2:]


def _import_own(environment: Mapping[str, str]) -> None:
    """Import the external modules of this run, like verl does on import, from folders that the server did not know."""
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    for name in filter(None, environment.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)


def _end_with(link: int) -> None:
    """End when the process that asked for this one does."""
    while os.read(link, 64):
        pass
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
