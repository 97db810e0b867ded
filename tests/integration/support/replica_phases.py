"""Plugin of a test run: asks for another number of replicas in every step, and lets the test do its part in between.

Driver and test talk through files in $PHASES: `NAME.json` is there once NAME has happened. With $PHASES_BY=scaler it
asks for nothing, and writes down which replicas the run's own scaler leads to.
"""

import json
import os
import signal
import time
from pathlib import Path

import ray

from verl_fuse.hookspecs import hookimpl
from verl_fuse.host.upstream.vllm import engine_processes
from verl_fuse.spec.events import Polled, StepBegun

HOOK_API = 2
# Wanted in step 1, 2, ...: two replicas are created while one generates, and generate in step 5; one is created again,
# and lost with its node in step 9.
WANTED = (1, 3, 3, 3, 3, 1, 2, 2, 2, 2)
# Before these steps the run waits, so that the number of steps it takes until replicas are up does not matter.
UP_BEFORE, FREED, UP_AGAIN_BEFORE, LOST_IN = 4, 6, 8, 9
# The same where the scaler decides, which knows what decoding costs from step 3 on.
SCALED_BEFORE = 5
_state: dict = {}


def scaler_decides() -> bool:
    return os.environ.get("PHASES_BY") == "scaler"


def tell(name: str, **data) -> None:
    """`name` has happened."""
    folder = Path(os.environ["PHASES"])
    (folder / f"{name}.part").write_text(json.dumps(data))
    (folder / f"{name}.part").rename(folder / f"{name}.json")


def told(name: str, seconds: float = 120.0) -> dict:
    """Wait until `name` has happened."""
    file = Path(os.environ["PHASES"]) / f"{name}.json"
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not happen in {seconds} s")
        time.sleep(0.05)
    return json.loads(file.read_text())


def engine(server) -> tuple[int, str]:
    """Runs inside a replica's server: the process of its engine, and its node."""
    (process,) = engine_processes(server)
    return process.pid, ray.get_runtime_context().get_node_id()


def _pool():
    return _state["trainer"].director.routing._pool


def engines() -> dict[int, tuple[int, str]]:
    """Process and node of each standalone replica."""
    return {
        rank: tuple(ray.get(started.replica.servers[0].__ray_call__.remote(engine)))
        for rank, started in _pool()._members.items()
    }


def wait_for_launches() -> None:
    deadline = time.monotonic() + 240
    launches = _pool()._launches
    while not all(launch.done for launch in launches):
        if time.monotonic() > deadline:
            raise TimeoutError("no replica in 240 s")
        time.sleep(0.2)


@hookimpl
def fuse_setup(trainer):
    _state["trainer"] = trainer._trainer


@hookimpl
def fuse_scale(prompts, replicas, most):
    step, ranks = _state["trainer"].global_steps, [replica.rank for replica in replicas]
    if scaler_decides():
        tell(f"scaled_{step}", ranks=ranks)
        return None
    tell(f"step_{step}", ranks=ranks, most=most, pids=engines())
    return WANTED[step - 1]


@hookimpl
def fuse_event(event):
    if scaler_decides():
        if isinstance(event, StepBegun) and event.step == SCALED_BEFORE:
            wait_for_launches()
    elif isinstance(event, StepBegun):
        _begin(event.step)
    elif isinstance(event, Polled) and event.step == LOST_IN:
        victim = _state.get("victim")
        if victim and any(view.rank == victim["rank"] and view.running for view in event.view.replicas):
            del _state["victim"]
            tell("stopped", **victim, finished=event.view.finished)
            told("node_gone")


def _begin(step: int) -> None:
    if step == LOST_IN:
        # What it gets stays with it until its node is gone, however short the responses.
        ((rank, (pid, node)),) = engines().items()
        os.kill(pid, signal.SIGSTOP)
        _state["victim"] = {"rank": rank, "node": node, "pid": pid}
    if step in (UP_BEFORE, UP_AGAIN_BEFORE):
        wait_for_launches()
    if step == FREED + 1:
        tell("freed")
        told("taken")
