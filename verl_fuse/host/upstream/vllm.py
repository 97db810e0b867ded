"""Asks verl's rollout server (vLLMHttpServer) beyond verl's interface, about itself and its engine, vLLM's AsyncLLM;
and ends that engine.

The servers of another engine would be asked here too. A server that cannot answer returns None or an empty result.
Light: neither verl nor vLLM is imported.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from verl_fuse.host.upstream.death import is_dying

# A server may take this many seconds to end its engine.
ENDING = 10.0


def is_death(error: RayError) -> bool:
    """Tell whether this error means that a server is gone, and not out of reach for a while, or its engine process
    (EngineDeadError, raised inside the server)."""
    gone = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    # A failed task raises a class of Ray's that also derives from the class raised inside the actor.
    return gone or any(cls.__name__ == "EngineDeadError" for cls in type(error).__mro__)


def end(server: Any) -> None:
    """End the engine behind the server with this handle; end the server if it does not end its engine itself."""
    ended = server.__ray_call__.remote(kill_engine)
    done, _ = ray.wait([ended], timeout=ENDING)
    try:
        if done and ray.get(ended):
            return
    except RayError:
        return  # The server is dead already.
    ray.kill(server)


# The functions below run inside a server: `server.__ray_call__.remote(fault)`.


def kill_engine(server: Any) -> int:
    """End the server's engine processes and the workers that they have started, which do not notice where they hang;
    return the number of processes that it knows of."""
    processes = engine_processes(server)
    if processes:
        import psutil

        doomed = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                doomed.append(psutil.Process(process.pid))
                doomed += doomed[-1].children(recursive=True)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    return len(processes)


def engine_processes(server: Any) -> Sequence[Any]:
    """Return the processes of the server's engine, as far as the server knows them."""
    resources = getattr(getattr(getattr(server, "engine", None), "engine_core", None), "resources", None)
    return getattr(getattr(resources, "engine_manager", None), "processes", ())


def fault(actor: Any) -> str | None:
    """Return the fault of an actor's engine, or None."""
    # vLLM notices only a tenth of a second later that its engine was killed.
    dying = any(is_dying(process.pid) for process in engine_processes(actor))
    dead = dying or getattr(getattr(actor, "engine", None), "errored", False)
    return "its engine process is dead" if dead else None


def weights_version(server: Any) -> int | None:
    """Return the step of the server's weights."""
    return server.global_steps


def kv_cache_tokens(server: Any) -> int | None:
    """Return the tokens that the server's KV cache holds."""
    cache = getattr(getattr(getattr(server, "engine", None), "vllm_config", None), "cache_config", None)
    blocks = getattr(cache, "num_gpu_blocks", None)
    return blocks * cache.block_size if cache is not None and blocks else None


def held(server: Any) -> tuple[int, int] | None:
    """Return the number of requests that the server holds, in its engine or parked at verl's gate, and a fingerprint of
    their tokens; None where that is not known, as of a prefill server, whose requests are with others."""
    states = getattr(getattr(getattr(server, "engine", None), "output_processor", None), "request_states", None)
    if states is None or getattr(server, "_pd_decode_peers", None):
        return None
    parked = getattr(getattr(server, "_resume_event", None), "_waiters", ())
    tokens = {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state.detokenizer}
    # An admitted request may wait for the engine to take it.
    engine = max(len(states), getattr(server, "_admitting", 0))
    return engine + len(parked), hash(frozenset(tokens.items()))
