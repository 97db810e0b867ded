"""Extends verl's worker classes: each rank records its calls.

Only the methods verl dispatches to are wrapped, and every wrapper keeps verl's dispatch attributes, so the worker group
sees the same methods as before.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import ray
from verl.single_controller.base.decorator import Dispatch, register

from verl_fuse.host.record.spans import Recorder, remote_recorder
from verl_fuse.spec.timeline import (
    OLD_LOG_PROB,
    RANK,
    REF_LOG_PROB,
    SAVE_CHECKPOINT,
    STREAM_UPDATE,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    UPDATE_WEIGHTS,
    VALUES,
    Category,
)

# method -> (span name, category), per role; a training step calls these methods of verl/workers/engine_workers.py.
ACTOR_METHODS: dict[str, tuple[str, Category]] = {
    "compute_log_prob": (OLD_LOG_PROB, "inference"),
    "compute_ref_log_prob": (REF_LOG_PROB, "inference"),
    "update_actor": (UPDATE_ACTOR, "train"),
    "update_weights": (UPDATE_WEIGHTS, "sync"),
    "save_checkpoint": (SAVE_CHECKPOINT, "other"),
}
CRITIC_METHODS: dict[str, tuple[str, Category]] = {
    "infer_batch": (VALUES, "inference"),
    "train_mini_batch": (UPDATE_CRITIC, "train"),
    "save_checkpoint": (SAVE_CHECKPOINT, "other"),
}
STREAM_METHODS: dict[str, tuple[str, Category]] = {
    "stream_rows": (STREAM_UPDATE, "train"),
    "stream_finish": (UPDATE_ACTOR, "train"),
}
RECORDED_METHODS = {"actor": ACTOR_METHODS, "critic": CRITIC_METHODS}


def recording_worker_class(role: str, base: type, first: int = 0) -> type:
    """Return a subclass of verl's worker class for `role` ("actor" or "critic") whose calls are recorded as spans on
    the rank's track. Its rank 0 is on the device of the actor's rank `first`, and tracks have the actor's numbers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def export_weights(self: Any, whole: bool) -> Any:
        """Leave this rank's share of the model's parameters in Ray's object store, see weights/exports.py."""
        from verl_fuse.host.weights.exports import export_weights

        return export_weights((self.actor if role == "actor" else self).engine, whole)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def export_whole(self: Any) -> list[Any]:
        """Return references to this rank's part of the actor's whole parameters in Ray's object store, see
        weights/exports.py."""
        from verl_fuse.host.weights.exports import export_whole

        return export_whole(self.actor.engine, self.rank, self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def report_memory(self: Any) -> Any:
        """Return the memory of this rank, see weights/memory.py."""
        from verl_fuse.host.weights.memory import rank_memory, store_bytes

        node = ray.get_runtime_context().get_node_id()
        return rank_memory((self.actor if role == "actor" else self).engine, node, store_bytes(node))

    exports: dict[str, Any] = {"export_weights": export_weights, "report_memory": report_memory}
    if role == "actor":
        exports["export_whole"] = export_whole
    if hasattr(base, "fused_update"):
        # The ops of a fused update are spans as well, by the clock of this rank's node.
        exports["fused_update"] = _with_spans(base.fused_update)
    wrapped = {
        name: _recorded(getattr(base, name), span, category, first)
        for name, (span, category) in (RECORDED_METHODS[role] | _streamed_methods(base)).items()
    }
    return type(
        f"Fuse{base.__name__}",
        (base,),
        {"__doc__": f"{base.__name__}, recording its calls.", **exports, **wrapped},
    )


def _streamed_methods(base: type) -> dict[str, tuple[str, Category]]:
    """Return the methods of a class whose updates may be streamed (plugins/verl_fuse_update/stream/worker.py)."""
    return {name: named for name, named in STREAM_METHODS.items() if hasattr(base, name)}


def _recorded(method: Callable, name: str, category: Category, first: int) -> Callable:
    def track(worker: Any) -> str:
        return f"{RANK} {first + worker.rank}"

    def args_of(call: tuple) -> dict[str, int]:
        return {"samples": len(call[0])} if call and hasattr(call[0], "keys") and hasattr(call[0], "__len__") else {}

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _recorder(self).span(name, track(self), category, **args_of(args)):
                return await method(self, *args, **kwargs)

        return run_async

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _recorder(self).span(name, track(self), category, **args_of(args)):
            return method(self, *args, **kwargs)

    return run


def _with_spans(method: Callable) -> Callable:
    """Return `method`, a fused update (verl_fuse_pipeline/megatron/worker.py), with its measured spans handed to the
    collector."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = method(self, *args, **kwargs)
        for span in outputs[-1].spans:
            _recorder(self).add(span)
        return outputs

    return run


def _recorder(worker: Any) -> Recorder:
    if "_verl_fuse_recorder" not in worker.__dict__:
        worker._verl_fuse_recorder = remote_recorder()
    return worker._verl_fuse_recorder
