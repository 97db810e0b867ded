"""The contract between verl-fuse and its plugins. Built-in features use these hooks and no others."""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from verl_fuse.spec.contract import Contract
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Event, LaneView, Migration, Refusal, ReplicaView, RequestView, RolloutView
from verl_fuse.spec.timeline import Timeline

# Raised whenever a hook changes incompatibly; a plugin states the version it was written for as HOOK_API.
HOOK_API = 1

hookspec = pluggy.HookspecMarker("verl_fuse")
hookimpl = pluggy.HookimplMarker("verl_fuse")


@hookspec
def fuse_config() -> type:  # type: ignore[empty-body]
    """Return the frozen dataclass of this plugin's block; it appears in the config as `fuse.<plugin name>`."""


@hookspec
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    """Return what keeps the composed verl configuration (with its `fuse` block) from running with this plugin."""


@hookspec
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:  # type: ignore[empty-body]
    """Return what this plugin rests on upstream under the composed configuration, or under any (None); checked before a run starts."""


@hookspec(firstresult=True)
def fuse_worker_class(model: str, base: type, config: Mapping[str, Any]) -> type | None:
    """Return the class of the workers of "actor" or "critic", a subclass of verl's `base`, or None to leave it."""


@hookspec
def fuse_setup(trainer: Any) -> None:
    """Called once, after verl's worker groups, replicas and checkpoint are up and before the first weight sync."""


@hookspec(firstresult=True)
def fuse_predict(prompts: Sequence[Prompt]) -> Sequence[Prediction] | None:
    """Return how long the responses to each of these prompts will be, or None where nothing is known."""


@hookspec(firstresult=True)
def fuse_scale(prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int | None:
    """Return how many replicas generate this step, up to `most`: of `replicas` the last are free, those missing are created; None for all there are."""


@hookspec(firstresult=True)
def fuse_assign(
    prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
) -> Mapping[str, int] | None:
    """Return on which replica (rank) the samples of each prompt (uid) are generated, beside what is `running` there, or
    None to leave them to verl."""


@hookspec(firstresult=True)
def fuse_infer_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    """Return the keys of finished samples this lane should run inference on now, or None to leave it idle."""


@hookspec(firstresult=True)
def fuse_migration(view: RolloutView) -> Migration | None:
    """Return which replicas finish the rollout's long tail, or None to leave all requests where they are."""


@hookspec(firstresult=True)
def fuse_transfer(request: RequestView, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a KV connector of vLLM is told with the request (`kv_transfer_params`), or None to leave it to others; asked for every request, in agent-loop workers."""


@hookspec
def fuse_event(event: Event) -> None:
    """Observe the run: setup, step begin, polls of the rollout, stages, step end with its timeline, end of training."""


@hookspec
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    """Return metrics of the finished step; they are logged through verl's Tracking under the names given."""
