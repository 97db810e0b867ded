"""Questions to verl's rollout server (vLLMHttpServer) beyond verl's interface, of itself and of its engine, vLLM's
AsyncLLM; and how that engine is ended.

The servers of another engine would be asked here too. One that lacks what is asked for says so with None, or nothing.
Light: neither verl nor vLLM is imported.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from verl_fuse.host.upstream.death import is_dying

# Seconds until a server has ended its engine.
ENDING = 10.0


def is_death(error: RayError) -> bool:
    """Whether this says that a server is gone, or that its engine process is (EngineDeadError,
    raised inside the server)."""
    # A failed task raises a class of Ray's that also derives from the class raised inside the actor.
    return isinstance(error, RayActorError) or any(cls.__name__ == "EngineDeadError" for cls in type(error).__mro__)


def end(server: Any) -> None:
    """End the engine behind the server with this handle, or, if it does not do so itself, the server."""
    ended = server.__ray_call__.remote(kill_engine)
    done, _ = ray.wait([ended], timeout=ENDING)
    try:
        if done and ray.get(ended):
            return
    except RayError:
        return  # dead already
    ray.kill(server)


# What follows runs inside a server: `server.__ray_call__.remote(fault)`.


def kill_engine(server: Any) -> int:
    """End its engine processes; how many it knows of."""
    processes = engine_processes(server)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return len(processes)


def engine_processes(server: Any) -> Sequence[Any]:
    """The processes of its engine, as far as it knows of them."""
    resources = getattr(getattr(getattr(server, "engine", None), "engine_core", None), "resources", None)
    return getattr(getattr(resources, "engine_manager", None), "processes", ())


def fault(actor: Any) -> str | None:
    """The fault of the engine of an actor, if it has one."""
    # For a tenth of a second after its engine is killed, vLLM does not know.
    dying = any(is_dying(process.pid) for process in engine_processes(actor))
    dead = dying or getattr(getattr(actor, "engine", None), "errored", False)
    return "its engine process is dead" if dead else None


def weights_version(server: Any) -> int | None:
    """The step its weights come from."""
    return server.global_steps


def kv_cache_tokens(server: Any) -> int | None:
    """Tokens its KV cache holds."""
    cache = getattr(getattr(getattr(server, "engine", None), "vllm_config", None), "cache_config", None)
    blocks = getattr(cache, "num_gpu_blocks", None)
    return blocks * cache.block_size if cache is not None and blocks else None


def generated(server: Any) -> tuple[int, int] | None:
    """A fingerprint of its requests and of the tokens they have."""
    states = getattr(getattr(getattr(server, "engine", None), "output_processor", None), "request_states", None)
    if states is None:
        return None
    tokens = {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state.detokenizer}
    return len(states), hash(frozenset(tokens.items()))
