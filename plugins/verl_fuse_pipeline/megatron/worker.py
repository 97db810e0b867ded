"""Makes the worker classes of a run that trains actor and critic together: verl's own, with Megatron engines in views
and one call that updates both.

verl builds the workers of a process's roles side by side and gives none a reference to another, so they meet in this
module.
"""

from functools import cache
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from verl_fuse.spec.schedule import Schedule
from verl_fuse_pipeline.megatron.engine import use_views
from verl_fuse_pipeline.report import RankReport, UpdateOrder

_workers: dict[str, Any] = {}


def pipeline_worker_class(model: str, base: type) -> type:
    """Return a subclass of verl's worker class of a model ("actor" or "critic") whose engine lives in a view; the
    critic's has `fused_update`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # By value in another process, this function must find that process's module.
        from verl_fuse_pipeline.megatron import worker

        worker.use_views()
        base.__init__(self, *args, **kwargs)
        worker._workers[model] = self

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def fused_update(self: Any, critic_data: Any, actor_data: Any, order: UpdateOrder) -> tuple[Any, Any, RankReport]:
        """Update both models on this rank's data: return verl's outputs of `train_mini_batch` and `update_actor`, and
        the measurements."""
        from verl_fuse_pipeline.megatron import worker

        return worker.update(self, base, critic_data, actor_data, order)

    members = {"__doc__": f"{base.__name__} with its engine in a view.", "__init__": __init__}
    return type(
        f"Pipeline{base.__name__}", (base,), members | ({"fused_update": fused_update} if model == "critic" else {})
    )


def update(
    critic: Any, base: type, critic_data: Any, actor_data: Any, order: UpdateOrder
) -> tuple[Any, Any, RankReport]:
    """Make one update of this process's workers, through verl's own methods."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    actor = _workers["actor"]
    jobs = {
        "actor": lambda: ActorRolloutRefWorker.update_actor(actor, actor_data),
        "critic": lambda: base.train_mini_batch(critic, critic_data),  # type: ignore[attr-defined]
    }
    schedules = {counts: _schedule(text) for counts, text in order.schedules.items()}
    results, report = _fusion(order.timeout).run(jobs, schedules, order.together)
    return results["critic"], results["actor"], report


@cache
def _fusion(timeout: float) -> Any:
    from verl_fuse_pipeline.megatron.fusion import Fusion

    return Fusion({"actor": _workers["actor"].actor.engine, "critic": _workers["critic"].engine}, timeout)


@cache
def _schedule(text: str) -> Schedule:
    return Schedule.from_json(text)


__all__ = ["pipeline_worker_class", "update", "use_views"]
