"""Puts each of verl's Megatron engines in the parallel-state view of its model.

Colocated engines of one process share the layout of whichever initialises first. These classes give actor and reference
Megatron's own layout of ranks and the critic mirrored pipelines, each with its own sizes: whatever is called on an
engine (initialisation, training, inference, checkpoints, weight export, questions about its ranks) runs in its view.
verl finds them in its registry under the vendor `VENDOR`.

Invariants (tests/integration/test_pipeline_engines.py):
- engines of one layout share a view, of others never, and every public method and property of verl's class runs in it;
- what a method hands back to be iterated over later is computed in the view as well.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from verl_fuse_pipeline.megatron.view import View

VENDOR = "verl_fuse"


def view_of(model_type: str, engine_config: Any) -> View:
    """Return the view for a model of this type with these sizes (verl's McoreEngineConfig); value models are
    mirrored."""
    return _view(
        model_type == "value_model",
        engine_config.tensor_model_parallel_size,
        engine_config.pipeline_model_parallel_size,
        engine_config.context_parallel_size,
        engine_config.expert_model_parallel_size,
        engine_config.expert_tensor_parallel_size,
    )


@functools.cache
def _view(mirrored: bool, *sizes: int | None) -> View:
    """Return the one view of all engines with these sizes."""
    return View("critic" if mirrored else "actor", mirrored)


def viewed(engine_class: Any) -> type:
    """Return a subclass of one of verl's engine classes whose instances live in their view."""

    def __init__(
        self: Any, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self.view = view_of(model_config.model_type, engine_config)
        with self.view.active():
            engine_class.__init__(self, model_config, engine_config, optimizer_config, checkpoint_config)
        self.view.self_test()

    members: dict[str, Any] = {"__init__": __init__, "__doc__": f"{engine_class.__name__} in the view of its model."}
    for name, member in inspect.getmembers_static(engine_class):
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            members[name] = _in_view(member)
        elif isinstance(member, property):
            members[name] = property(_in_view(member.fget))  # type: ignore[arg-type]
    return type(f"Viewed{engine_class.__name__}", (engine_class,), members)


def _in_view(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.view.active():
            found = method(self, *args, **kwargs)
        if type(found) is tuple:
            return tuple(_iterated(self.view, part) for part in found)
        return _iterated(self.view, found)

    return run


def _iterated(view: View, found: Any) -> Any:
    return _stepped(view, found) if isinstance(found, GeneratorType) else found


def _stepped(view: View, found: Iterator[Any]) -> Iterator[Any]:
    """Yield the same items, each computed in the view; between two of them the view is not in force."""
    while True:
        with view.active():
            try:
                item = next(found)
            except StopIteration:
                return
        yield item


@functools.cache
def use_views() -> None:
    """Let this process's Megatron engines live in views from now on."""
    for model_type, engine_class in (
        ("language_model", MegatronEngineWithLMHead),
        ("value_model", MegatronEngineWithValueHead),
    ):
        EngineRegistry.register(model_type=model_type, backend="megatron", vendor=VENDOR)(viewed(engine_class))
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
