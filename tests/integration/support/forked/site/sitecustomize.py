"""Makes Ray's and vLLM's Python processes forks of a process that has imported everything (server.py), instead of
importing for fifteen seconds each.

On PYTHONPATH, with $FORK_SERVER, this is run by every interpreter that starts. One that is to be verl's driver, a Ray
worker, what sets up a Ray worker, or a process spawned by `multiprocessing` hands its command, environment, working
directory and open files to the server, passes signals on to its fork, and ends as that does.
"""

import os
import sys


def _wanted() -> bool:
    words = sys.orig_argv[1:]
    script = next((word for word in words if not word.startswith("-")), "")
    if "-c" in words:
        return "--multiprocessing-fork" in words
    workers = ("ray/_private/workers/setup_worker.py", "ray/_private/workers/default_worker.py")
    return script.endswith(workers) or words[:2] == ["-m", "verl.trainer.main_ppo"]


def _be_forked(address: str) -> None:
    import array
    import json
    import signal
    import socket

    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if number != link.fileno() and _is_open(number)]
    asked = {
        "argv": sys.orig_argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        # What a Ray worker starts yields to others as much as the worker does, or it would starve the worker.
        "niceness": os.nice(0),
        "files": numbers,
    }
    data = json.dumps(asked).encode()
    link.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))])
    link.sendall(data)
    answers = link.makefile("r")
    pid = int(answers.readline())
    # Whoever looks for the process finds its fork by this name.
    with open("/proc/self/comm", "w") as name:
        name.write(f"fork {pid}")

    def pass_on(number: int, frame: object) -> None:
        os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for number in numbers:
        # Whoever waits for the end of a pipe waits for the fork's.
        os.close(number)
    code = int(answers.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if os.environ.get("FORK_SERVER") and _wanted():
    _be_forked(os.environ["FORK_SERVER"])
