"""Keeps several Megatron parallel states in one process, one per model, of which one is in force at a time.

Megatron keeps its process groups in the globals of one module, and verl's engines share them: the first to initialise
decides for all (`MegatronEngine._init_device_mesh` returns early). Inside a view an engine finds its own state, or none
yet, and initialises it with its own sizes. Everything an engine does belongs inside its view: initialisation, training,
inference, checkpoints, weight export, queries of its data-parallel rank. The tracker of random numbers is not part of a
view: models with dropout draw from one that they share.

Invariants (tests/integration/test_megatron_views.py):
- what is initialised or changed inside a view is there again the next time, and nowhere else;
- views nest, and leaving one, also by an error, restores what was in force before; entering the one in force changes
  nothing;
- every global that Megatron's module ever rebinds is part of a view.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import megatron.core.parallel_state as parallel_state
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse_pipeline.megatron.placement import mirrored_pipelines

# Groups whose order carries meaning, and the ranks they were meant to have.
_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "_PIPELINE_GLOBAL_RANKS",
    "_DATA_PARALLEL_GROUP": "_DATA_PARALLEL_GLOBAL_RANKS",
}


class View:
    """The parallel state of one model; `mirrored` lays its pipelines side by side with their stages in reverse."""

    _in_force: "View | None" = None

    def __init__(self, name: str, mirrored: bool = False) -> None:
        self.name = name
        self._mirrored = mirrored
        self._state = _pristine()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put this view in force."""
        if View._in_force is self:
            yield
            return
        before, outside = View._in_force, _read()
        View._in_force = self
        _write(self._state)
        try:
            with mirrored_pipelines() if self._mirrored else nullcontext():
                yield
        finally:
            self._state = _read()
            _write(outside)
            View._in_force = before

    @property
    def pipeline(self) -> tuple[int, ...]:
        """Return the global ranks of this process's pipeline in stage order."""
        with self.active():
            group: Any = parallel_state.get_pipeline_model_parallel_group()
            return tuple(dist.get_process_group_ranks(group))

    def self_test(self) -> None:
        """Raise a FuseError, collectively, unless this view's groups consist of the intended ranks, in that order, when
        they communicate."""
        with self.active():
            if not parallel_state.is_initialized():
                raise FuseError(f"view {self.name!r} has no parallel state yet; initialise its engine inside it first")
            state = _read()
            for group, ranks in _GROUPS.items():
                meant, group = list(state[ranks]), state[group]
                said = dist.get_process_group_ranks(group)
                answers: list[Any] = [None] * len(said)
                dist.all_gather_object(answers, dist.get_rank(), group=group)
                if not meant == said == answers:
                    raise FuseError(
                        f"view {self.name!r}: {ranks} are {meant}, but torch has the group as {said} and its ranks "
                        f"answer as {answers}; this torch or Megatron reorders groups"
                    )


@cache
def state_names() -> tuple[str, ...]:
    """Return every global that some function of Megatron's module rebinds."""
    tree = ast.parse(inspect.getsource(parallel_state))
    return tuple(sorted({name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}))


def _read() -> dict[str, Any]:
    return {name: getattr(parallel_state, name) for name in state_names()}


def _write(state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(parallel_state, name, value)


def _pristine() -> dict[str, Any]:
    """Return the globals of a process that has never initialised anything: the globals of a second, fresh execution of
    the module."""
    spec = importlib.util.find_spec("megatron.core.parallel_state")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in state_names()}
