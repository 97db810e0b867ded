"""A wait that may not last for ever: run it under a deadline, and say who was waited for when the deadline passes.

Invariants (tests/unit/host/test_watchdog.py):
- what the call returns or raises reaches the caller unchanged;
- once the deadline has passed, the caller gets a FuseError that names the wait, the seconds and the suspects, even if looking for
  suspects hangs or fails;
- the abandoned call keeps nobody from exiting.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from verl_fuse.errors import FuseError
from verl_fuse.host.upstream.death import engine_processes, is_dying

T = TypeVar("T")

# How long the search for suspects itself may take.
DIAGNOSIS_SECONDS = 30.0


def with_deadline(name: str, seconds: float, call: Callable[[], T], suspects: Callable[[], list[str]]) -> T:
    """Run `call` in a thread for at most `seconds`; past that, FuseError naming what `suspects` returns. The call goes on, abandoned."""
    worker = _Call(name, call)
    if worker.finished_within(seconds):
        return worker.result()
    raise FuseError(f"{name} did not finish in {seconds:g} s; waited for: {diagnosis(suspects)}")


def diagnosis(suspects: Callable[[], list[str]]) -> str:
    """Names found by `suspects`, or why they are unknown; takes DIAGNOSIS_SECONDS at most."""
    search = _Call("diagnosis", suspects)
    if not search.finished_within(DIAGNOSIS_SECONDS):
        return f"unknown (the diagnosis did not end in {DIAGNOSIS_SECONDS:g} s)"
    try:
        found = search.result()
    except Exception as error:  # noqa: BLE001  the deadline is the error to report
        return f"unknown (the diagnosis failed: {type(error).__name__}: {error})"
    return ", ".join(found) or "unknown (every process answers)"


class _Call:
    """A call running in a daemon thread, which the interpreter does not join at exit."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run, call), name=f"verl-fuse {name}", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._value = call()
        except BaseException as error:  # noqa: BLE001  handed to the caller
            self._error = error
        self._done.set()

    def finished_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def weight_sync_suspects(manager: Any, seconds: float = 5.0) -> list[str]:
    """Which processes of a verl CheckpointEngineManager are dead, have a dead engine, or do not answer within `seconds`."""
    actors = {f"trainer rank {rank}": worker for rank, worker in enumerate(manager.actor_wg.workers)}
    for replica in manager.replicas:
        for node, server in enumerate(replica.servers):
            actors[f"replica {replica.replica_rank} server" + (f" node {node}" if node else "")] = server
    return silent_actors(actors, seconds)


def silent_actors(actors: Mapping[str, Any], seconds: float) -> list[str]:
    """The given Ray actors (name -> handle) that are dead, have a dead engine, or do not answer within `seconds`."""
    import ray
    from ray.exceptions import RayError

    pings = {actor.__ray_call__.remote(_state): name for name, actor in actors.items()}
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
    """Whether a Ray actor, or the rollout engine it fronts, is dead; one that does not answer within `seconds` may live."""
    return any("does not answer" not in found for found in silent_actors({"actor": actor}, seconds))


def _state(actor: Any) -> str | None:
    """Runs inside an actor: what is wrong with the rollout engine it fronts, if it fronts one (vLLM's AsyncLLM.errored)."""
    # For a tenth of a second after its engine is killed, vLLM does not know.
    dying = any(is_dying(process.pid) for process in engine_processes(actor))
    if dying or getattr(getattr(actor, "engine", None), "errored", False):
        return "its engine process is dead"
    return None
