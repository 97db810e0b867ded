"""Defines the contract between verl-fuse and its plugins. Built-in features use these hooks and no other hook."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pluggy
from omegaconf import DictConfig

from verl_fuse.feature import Feature
from verl_fuse.spec.composed import Get, getter
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.events import Event
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import LaneView, Migration, Refusal, ReplicaView, RequestView, RolloutView, Stage
from verl_fuse.spec.timeline import Timeline

# Raised whenever a hook changes incompatibly; a plugin states the version it was written for as HOOK_API.
HOOK_API = 2
# A plugin written for the version before is told this.
SINCE_1 = (
    "since 1 events are classes of verl_fuse.spec.events, and fuse_setup gets a verl_fuse.hookspecs.Trainer; see "
    '"From HOOK_API 1 to 2" in plugins/README.md'
)

hookspec = pluggy.HookspecMarker("verl_fuse")
hookimpl = pluggy.HookimplMarker("verl_fuse")


class Configured:
    """A plugin with a `block` of configuration, records of its `features`, and `refused`, which yields what keeps a
    configuration from running with it."""

    block: type
    features: Sequence[Feature]
    refused: Callable[[Get], Iterable[Refusal]]

    @hookimpl
    def fuse_config(self) -> type:
        return self.block

    @hookimpl
    def fuse_features(self) -> Sequence[Feature]:
        return self.features

    @hookimpl
    def fuse_validate(self, config: Mapping[str, Any]) -> Sequence[Refusal]:
        return list(self.refused(getter(config)))


class Trainer(Protocol):
    """A plugin's view of the run at `fuse_setup`, with the features that it can switch on."""

    @property
    def config(self) -> DictConfig:  # type: ignore[empty-body]
        """Return verl's composed configuration, with its `fuse` block."""

    @property
    def streamed_stages(self) -> tuple[Stage, ...]:  # type: ignore[empty-body]
        """Return the stages that finished samples go through; none where verl computes nothing of a sample before the
        batch is complete."""

    @property
    def devices_each(self) -> int:  # type: ignore[empty-body]
        """Return the number of devices of one rollout replica."""

    def block(self, plugin: str) -> Any:
        """Return the block `fuse.<plugin>`, read and checked: an instance of the class that `fuse_config` of that
        plugin returned."""

    def replica_views(self) -> tuple[ReplicaView, ...]:  # type: ignore[empty-body]
        """Return a view of every rollout replica."""

    def training_memory(self) -> Mapping[str, Sequence[RankMemory]]:  # type: ignore[empty-body]
        """Return the memory of the ranks that train "actor" and "critic" on FSDP or Megatron, in order of rank; asks
        all ranks."""

    def use_routing(self, warm_prefix_tokens: int | None) -> None:
        """Ask `fuse_predict`, `fuse_scale` and `fuse_assign` before each batch is submitted. One request prefills a
        prompt of at least `warm_prefix_tokens` (None: none) before its samples are asked for."""

    def add_part(self, make: Callable[[Any, Mapping[str, Any]], Any]) -> None:
        """Add what `make` returns, a `verl_fuse.host.record.step.TrainerPart`, to the parts of the step. `make` gets
        verl's trainer, and the worker groups that train "actor" and "critic"."""

    def shares_prompts(self, model: Literal["actor", "critic"] = "actor") -> bool:
        """Tell whether the workers of this model compute each prompt once, the actor's reference included; asks all of
        them. `fuse_worker_class` must have returned such workers."""
        ...


@hookspec
def fuse_config() -> type:  # type: ignore[empty-body]
    """Return the frozen dataclass of this plugin's block; it appears in the config as `fuse.<plugin name>`."""


@hookspec
def fuse_features() -> Sequence[Feature]:  # type: ignore[empty-body]
    """Return the records of this plugin's features, from which presets, `advise`, `simulate` and the documentation know
    them."""


@hookspec
def fuse_validate(config: Mapping[str, Any]) -> Sequence[Refusal] | None:
    """Return the refusals that keep the composed verl configuration (with its `fuse` block) from running with this
    plugin."""


@hookspec
def fuse_contracts(config: Mapping[str, Any] | None) -> Sequence[Contract]:  # type: ignore[empty-body]
    """Return the contracts about upstream code that this plugin rests on under the composed configuration, or under any
    (None); they are checked before a run starts."""


@hookspec
def fuse_overrides(config: Mapping[str, Any], run_dir: Path) -> Mapping[str, Any] | None:
    """Return the values that this plugin sets in verl's configuration, by dotted key; a run keeps its files in
    `run_dir`."""


@hookspec(firstresult=True)
def fuse_worker_class(model: str, base: type, config: Mapping[str, Any]) -> type | None:
    """Return the class of the workers of "actor" or "critic", a subclass of verl's `base`, or None to leave `base`."""


@hookspec(firstresult=True)
def fuse_devices(model: str, config: Mapping[str, Any]) -> range | None:
    """Return the training devices, by number, on which `model` ("critic") has workers of its own, or None to leave
    `model` beside the actor on all devices."""


@hookspec
def fuse_setup(trainer: Trainer) -> None:
    """Set up the plugin; called once, after verl's worker groups, replicas and checkpoint are up and before the first
    weight sync."""


@hookspec(firstresult=True)
def fuse_predict(prompts: Sequence[Prompt]) -> Sequence[Prediction] | None:
    """Return a prediction of the lengths of the responses to each of these prompts, or None where nothing is known."""


@hookspec(firstresult=True)
def fuse_scale(prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int | None:
    """Return the number of replicas that generate this step, up to `most`: the last of `replicas` are free, missing
    replicas are created; None: all that exist."""


@hookspec(firstresult=True)
def fuse_assign(
    prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
) -> Mapping[str, int] | None:
    """Return the replica (rank) that generates the samples of each prompt (uid), beside the prompts `running` there, or
    None to leave the choice to verl."""


@hookspec(firstresult=True)
def fuse_infer_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    """Return the keys of finished samples this lane should run inference on now; an empty list leaves the lane idle,
    None leaves the answer to others."""


@hookspec(firstresult=True)
def fuse_train_next(view: RolloutView, lane: LaneView) -> Sequence[str] | None:
    """Return the keys of complete groups whose gradients this lane should compute now; an empty list leaves the lane
    idle, None leaves the answer to others."""


@hookspec(firstresult=True)
def fuse_migration(view: RolloutView) -> Migration | None:
    """Return which replicas finish the rollout's long tail, or None to leave all requests where they are."""


@hookspec(firstresult=True)
def fuse_transfer(request: RequestView, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `kv_transfer_params` that a KV connector of vLLM gets with the request, or None to leave the answer to
    other plugins; asked for every request, in agent-loop workers."""


@hookspec
def fuse_event(event: Event) -> None:
    """Observe the run: each event is an instance of one class of `verl_fuse.spec.events`."""


@hookspec
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    """Return metrics of the finished step; they are logged through verl's Tracking under the names given."""
