"""Bounds a wait: runs a call under a deadline, and names the suspects when the deadline passes.

Invariants (tests/unit/host/test_watchdog.py):
- the result or the exception of the call reaches the caller unchanged;
- once the deadline has passed, the caller gets a FuseError that names the wait, the seconds and the suspects, even if
the search for suspects hangs or fails;
- the abandoned call keeps no process from exiting.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.vllm import fault

T = TypeVar("T")

# The search for suspects itself may take this many seconds.
DIAGNOSIS_SECONDS = 30.0


def with_deadline(name: str, seconds: float, call: Callable[[], T], suspects: Callable[[], list[str]]) -> T:
    """Run `call` in a thread for at most `seconds`; later raise a FuseError that names the result of `suspects`. The
    call goes on, abandoned."""
    begun = _begun(name, call)
    if wait([begun], timeout=seconds).done:
        return begun.result()
    raise FuseError(f"{name} did not finish in {seconds:g} s; waited for: {diagnosis(suspects)}")


def diagnosis(suspects: Callable[[], list[str]]) -> str:
    """Return the names found by `suspects`, or why they are unknown; takes DIAGNOSIS_SECONDS at most."""
    search = _begun("diagnosis", suspects)
    if not wait([search], timeout=DIAGNOSIS_SECONDS).done:
        return f"unknown (the diagnosis did not end in {DIAGNOSIS_SECONDS:g} s)"
    try:
        found = search.result()
    except Exception as error:  # noqa: BLE001  The deadline is the error to report.
        return f"unknown (the diagnosis failed: {type(error).__name__}: {error})"
    return ", ".join(found) or "none that is dead or silent (every process answers)"


def _begun(name: str, call: Callable[[], T]) -> Future[T]:
    """Return a call running in a daemon thread, which the interpreter does not join at exit."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001  The error is handed to the caller.
            future.set_exception(error)

    threading.Thread(target=run, name=f"verl-fuse {name}", daemon=True).start()
    return future


def weight_sync_suspects(manager: Any, seconds: float = 5.0) -> list[str]:
    """Return the processes of a verl CheckpointEngineManager that are dead, have a dead engine, or do not answer within
    `seconds`."""
    actors = {f"trainer rank {rank}": worker for rank, worker in enumerate(manager.actor_wg.workers)}
    for replica in manager.replicas:
        for node, server in enumerate(replica.servers):
            actors[f"replica {replica.replica_rank} server" + (f" node {node}" if node else "")] = server
    return silent_actors(actors, seconds)


def silent_actors(actors: Mapping[str, Any], seconds: float) -> list[str]:
    """Return the given Ray actors (name -> handle) that are dead, have a dead engine, or do not answer within
    `seconds`."""
    import ray
    from ray.exceptions import RayError

    pings = {actor.__ray_call__.remote(fault): name for name, actor in actors.items()}
    answered, silent = ray.wait(list(pings), num_returns=len(pings), timeout=seconds) if pings else ([], [])
    found = [f"{pings[ping]} (does not answer)" for ping in silent]
    for ping in answered:
        try:
            state = ray.get(ping)
        except RayError as error:
            state = f"dead: {str(error).splitlines()[0]}"
        if state:
            found.append(f"{pings[ping]} ({state})")
    return sorted(found)


def is_dead(actor: Any, seconds: float) -> bool:
    """Tell whether a Ray actor, or the rollout engine it fronts, is dead; an actor that does not answer within
    `seconds` may live."""
    return any("does not answer" not in found for found in silent_actors({"actor": actor}, seconds))
