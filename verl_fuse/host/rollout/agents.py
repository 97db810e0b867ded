"""Builds agent loops without Hydra.

verl builds an agent loop for each sample, through Hydra, in the event loop that sends all requests of an agent-loop
worker and takes their answers: a step's requests leave, and its samples arrive, later by milliseconds a sample.

Invariant (tests/unit/host/test_agents.py): an agent that asks for more than its class is built by Hydra.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import hydra
import ray
from ray.actor import ActorHandle

# The module in which verl looks up agents and builds them.
AGENT_LOOPS = "verl.experimental.agent_loop.agent_loop"
# The module whose workers run the agents of prompts, and log their errors under its name.
AGENT_LOOP_WORKERS = "verl.trainer.ppo.v1.agent_loop_tq"
_TARGET = "_target_"
_found = lru_cache(maxsize=None)(hydra.utils.get_object)

logger = logging.getLogger(__name__)


def build_directly(agent_loop_manager: Any, timeout: float) -> None:
    """Let all agent-loop workers of verl build their agents directly; a worker that does not answer within `timeout`
    seconds costs a warning. A manager without such workers is left as it is."""
    for replaced in asked(agent_loop_manager, without_hydra, timeout):
        ray.get(replaced)


def asked(agent_loop_manager: Any, question: Callable[[Any], Any], timeout: float) -> list[Any]:
    """Return the answers (object references) of all agent-loop workers of verl to `question(worker)`; a worker that
    does not answer within `timeout` seconds costs a warning. A manager without such workers gives none."""
    loops = getattr(agent_loop_manager, "agent_loop_workers", None) or ()
    calls: list[Any] = [loop.__ray_call__.remote(question) for loop in loops if isinstance(loop, ActorHandle)]
    if not calls:
        return []
    answered, late = ray.wait(calls, num_returns=len(calls), timeout=timeout)
    if late:
        logger.warning("%d agent-loop workers did not answer within %g s", len(late), timeout)
    return answered


def without_hydra(_worker: Any) -> None:
    """Replace Hydra where verl builds agent loops; workers that are not verl's have no such place. Runs inside the
    worker."""
    if (module := sys.modules.get(AGENT_LOOPS)) is not None:
        module.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))  # type: ignore[attr-defined]


def instantiate(config: Mapping[str, Any], **arguments: Any) -> Any:
    """Return the object that `config` names, as Hydra's `instantiate` does; a registered agent is a class alone."""
    if set(config) == {_TARGET} and isinstance(config[_TARGET], str):
        return _found(config[_TARGET])(**arguments)
    return hydra.utils.instantiate(config=config, **arguments)
