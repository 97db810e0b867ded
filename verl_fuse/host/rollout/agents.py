"""Builds agent loops without Hydra.

verl builds an agent loop for each sample, through Hydra, in the event loop that sends all requests of an agent-loop
worker and takes their answers: a step's requests leave, and its samples arrive, later by milliseconds a sample.

Invariant (tests/unit/host/test_agents.py): an agent that asks for more than its class is built by Hydra.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import hydra
import ray

# The module in which verl looks up agents and builds them.
AGENT_LOOPS = "verl.experimental.agent_loop.agent_loop"
_TARGET = "_target_"
_class_of = lru_cache(maxsize=None)(hydra.utils.get_class)


def build_directly(agent_loop_manager: Any, timeout: float) -> None:
    """Let all agent-loop workers of verl build their agents directly; `timeout` is seconds a worker may take to answer.
    A manager without such workers is left as it is."""
    loops = getattr(agent_loop_manager, "agent_loop_workers", None) or ()
    ray.get([loop.__ray_call__.remote(without_hydra) for loop in loops], timeout=timeout)


def without_hydra(_worker: Any) -> None:
    """Replace Hydra where verl builds agent loops; workers that are not verl's have no such place. Runs inside the
    worker."""
    if (module := sys.modules.get(AGENT_LOOPS)) is not None:
        module.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))  # type: ignore[attr-defined]


def instantiate(config: Mapping[str, Any], **arguments: Any) -> Any:
    """Return the object that `config` names, as Hydra's `instantiate` does; a registered agent is a class alone."""
    if set(config) == {_TARGET}:
        return _class_of(config[_TARGET])(**arguments)
    return hydra.utils.instantiate(config=config, **arguments)
