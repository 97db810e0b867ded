"""Serves external modules of runs (VERL_USE_EXTERNAL_MODULES) that make an update twice from the same weights: the
state of the actor's ranks is kept, undone after the first update, and compared after the second."""

from collections.abc import Callable
from typing import Any


def on_workers(trainer: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `function(actor, *args)` on each rank."""
    import ray

    def call(worker: Any) -> Any:
        (found,) = worker.worker_dict.values()
        return function(found.actor, *args)

    return ray.get([worker.__ray_call__.remote(call) for worker in trainer.actor_rollout_wg.workers])


def keep(actor: Any) -> None:
    """Keep the state before the first update."""
    actor._before = {name: tensor.clone() for name, tensor in _held(actor).items()}
    actor._rate = actor.engine.lr_scheduler.state_dict()


def undo(actor: Any) -> None:
    """Undo the first update, and keep its outcome."""
    import torch

    actor._first = {name: tensor.clone() for name, tensor in _held(actor).items()}
    with torch.no_grad():
        for name, tensor in _held(actor).items():
            # State that the optimizer did not have yet begins at zero.
            tensor.copy_(actor._before[name]) if name in actor._before else tensor.zero_()
    actor.engine.lr_scheduler.load_state_dict(actor._rate)


def differences(actor: Any) -> dict[str, float]:
    """Return, for parameters and each of Adam's moments, the relative difference of both updates (l2 of all
    together)."""
    import torch

    second, found = _held(actor), {}
    for moment in ("", "exp_avg", "exp_avg_sq"):
        names = [name for name in sorted(second) if moment == name.partition(" ")[2]]
        one, other = (torch.cat([held[name].double().flatten() for name in names]) for held in (second, actor._first))
        found[moment or "parameters"] = float((one - other).norm() / one.norm())
    return found


def _held(actor: Any) -> dict[str, Any]:
    held = dict(actor.engine.module.named_parameters())
    for place, state in enumerate(actor.engine.optimizer.state.values()):
        held |= {f"{place} {key}": value for key, value in state.items()}
    return {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in held.items()}
