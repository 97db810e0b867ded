"""The object that plugins get at `fuse_setup`: the run's configuration, views of its replicas, and how a plugin takes
part in the step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from verl_fuse.host import assembly
from verl_fuse.host.record.step import TrainerPart
from verl_fuse.host.rollout.routing import Routing
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import ReplicaView, Stage


class Features:
    """The features of one FuseTrainer (`verl_fuse.hookspecs.Trainer`)."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def config(self) -> Any:
        """Return the composed configuration of the run."""
        return self._trainer.config

    def block(self, plugin: str) -> Any:
        """Return the block `fuse.<plugin>`, as the dataclass that the plugin declares."""
        return self._trainer.settings.blocks[plugin]

    @property
    def streamed_stages(self) -> tuple[Stage, ...]:
        """Return the stages that finished samples go through; none where verl computes nothing of a sample before the
        batch is complete."""
        return assembly.stages_of(self._trainer)

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Return a view of every rollout replica."""
        return self._trainer.replicas.views()

    @property
    def devices_each(self) -> int:
        """Return the number of devices of one replica."""
        return self._trainer.replicas.devices_each

    def training_memory(self) -> Mapping[str, Sequence[RankMemory]]:
        """Return the memory of the trained models' ranks, in order of rank; asks all ranks. Needs FSDP or Megatron."""
        lane = self._trainer.lane
        return {
            model: lane.wait(lane.submit(group.report_memory, "report_memory"), "report_memory")
            for model, group in assembly.training_groups(self._trainer).items()
        }

    def use_routing(self, warm_prefix_tokens: int | None) -> None:
        """Ask `fuse_predict`, `fuse_scale` and `fuse_assign` before each batch is submitted. A prompt's prefix of at
        least `warm_prefix_tokens` is computed once, before its samples are sent (None: never)."""
        trainer = self._trainer
        samples, timeout = trainer.config.actor_rollout_ref.rollout.n, trainer.settings.core.replica_timeout
        trainer.director.routing = Routing(trainer.llm_server_manager, trainer.replicas, timeout, samples)
        trainer.client_options["warm_prefix_tokens"] = warm_prefix_tokens

    def add_part(self, make: Callable[[Any, Mapping[str, Any]], TrainerPart]) -> None:
        """Add what `make` returns to the parts of the step; it gets verl's trainer and the worker groups of the trained
        models."""
        self._trainer.parts.append(make(self._trainer, assembly.training_groups(self._trainer)))

    def shares_prompts(self, model: Literal["actor", "critic"] = "actor") -> bool:
        """Tell whether a model's workers compute each prompt once, the actor's reference included; asks all of them.
        They must be of the class that host/sharing/engine.py makes."""
        lane, trainer = self._trainer.lane, self._trainer
        group = trainer.critic_wg if model == "critic" else trainer.actor_rollout_wg
        return all(lane.wait(lane.submit(group.shares_prompts, "shares_prompts"), "shares_prompts"))
