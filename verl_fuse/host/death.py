"""How the death of a rollout replica shows to those who call it. Light: neither verl nor vLLM is imported."""

from ray.exceptions import RayActorError, RayError, RayTaskError


def is_death(error: RayError) -> bool:
    """Whether this says that a replica's server is gone, or that its engine process is (vLLM's EngineDeadError, raised inside the server)."""
    # A failed task raises a class of Ray's that also derives from the class raised inside the actor.
    return isinstance(error, RayActorError) or any(cls.__name__ == "EngineDeadError" for cls in type(error).__mro__)


def first_line(error: Exception) -> str:
    """An error in one line; Ray's carry whole tracebacks, and what was raised inside an actor."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
