"""The object that plugins get at `fuse_setup`: the run's configuration, views of its replicas, and one method per
feature that a plugin may switch on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from omegaconf import OmegaConf

from verl_fuse.host import assembly
from verl_fuse.host.inference.refresh import SliceRefresh
from verl_fuse.host.record.step import TrainerPart
from verl_fuse.host.rollout.routing import Routing
from verl_fuse.host.rollout.standalone.sync import StandaloneSync
from verl_fuse.host.update.balance import BalancedUpdates, Model
from verl_fuse.host.update.critic.driver import CriticFirst
from verl_fuse.host.update.lean.driver import LeanUpdates
from verl_fuse.host.update.lean.options import LeanOptions
from verl_fuse.host.update.shared import PlacedPrompts
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

    def use_slices(self) -> None:
        """Run inference on slices, as replicas are released. Needs `streamed_stages`."""
        trainer = self._trainer
        slices = assembly.build_slices(trainer)
        shares = bool(OmegaConf.select(trainer.config, "fuse.update.share_prompts")) and self.shares_prompts()
        trainer.inference.use_slices(slices.lanes(assembly.extra_info(trainer)), shares)
        export = partial(assembly.exported, trainer, trainer.inference.stages)
        on_devices = assembly.exports_on_devices(trainer.config)
        trainer.parts.append(SliceRefresh(slices, trainer.lane, export, on_devices))

    def use_routing(self, warm_prefix_tokens: int | None) -> None:
        """Ask `fuse_predict`, `fuse_scale` and `fuse_assign` before each batch is submitted. A prompt's prefix of at
        least `warm_prefix_tokens` is computed once, before its samples are sent (None: never)."""
        trainer = self._trainer
        samples, timeout = trainer.config.actor_rollout_ref.rollout.n, trainer.settings.core.replica_timeout
        trainer.director.routing = Routing(trainer.llm_server_manager, trainer.replicas, timeout, samples)
        trainer.client_options["warm_prefix_tokens"] = warm_prefix_tokens

    def use_standalone(self, most: int, launch_timeout: float) -> None:
        """Let `fuse_scale` ask for up to `most` replicas more, each created within `launch_timeout` seconds. Needs
        `use_routing` before."""
        trainer = self._trainer
        assert isinstance(trainer.director.routing, Routing), "standalone replicas need use_routing"
        pool = assembly.build_standalone(trainer, most, launch_timeout)
        trainer.director.routing.use_pool(pool)
        trainer.client_options["standalone"] = most
        export = partial(assembly.exported_whole, trainer.actor_rollout_wg)
        trainer.parts.append(StandaloneSync(pool, trainer.run_stage, export))

    def add_part(self, make: Callable[[Any, Mapping[str, Any]], TrainerPart]) -> None:
        """Add what `make` returns to the parts of the step; it gets verl's trainer and the worker groups of the trained
        models."""
        self._trainer.parts.append(make(self._trainer, assembly.training_groups(self._trainer)))

    def use_lean_update(
        self,
        skip_zero_gradient: bool,
        skip_old_log_prob: bool,
        metrics: Literal["stock", "computed"],
        balance: bool = False,
        short_pass: bool = False,
        share: bool = False,
    ) -> None:
        """Leave samples without a gradient out of the actor's update, whose first mini-batch computes its old log-probs
        itself; `metrics` are of all samples or of those that are computed. `balance`: balanced in steps that leave no
        sample out, too. `short_pass`: the pass for the other mini-batches leaves out samples without a gradient.
        `share`: placed for workers that compute each prompt once. The actor's workers must be of the class that
        host/update/lean/worker.py makes."""
        correction = self.config.algorithm.get("rollout_correction", None)
        bypass = bool(correction and correction.get("bypass_mode", False))
        trainer, options = (
            self._trainer,
            LeanOptions(skip_zero_gradient, skip_old_log_prob, metrics, bypass, short_pass),
        )
        trainer.parts.append(LeanUpdates(trainer, trainer.run_stage, options, balance, share))

    def use_balanced_updates(self, models: Sequence[Model]) -> None:
        """Balance the updates of these models over ranks within each mini-batch."""
        self._trainer.parts.append(BalancedUpdates(self._trainer, models))

    def shares_prompts(self, model: Model = "actor") -> bool:
        """Tell whether a model's workers compute each prompt once, the actor's reference included; asks all of them.
        They must be of the class that host/sharing/engine.py makes."""
        lane, trainer = self._trainer.lane, self._trainer
        group = trainer.critic_wg if model == "critic" else trainer.actor_rollout_wg
        return all(lane.wait(lane.submit(group.shares_prompts, "shares_prompts"), "shares_prompts"))

    def use_shared_prompts(self, models: Sequence[Model], places: Sequence[Model], balance: bool) -> None:
        """Place samples of a prompt on one rank in the passes of these models and in the updates of `places`;
        `balance`: an update says what its order saves. Their workers must be of the classes that
        host/sharing/engine.py makes."""
        self._trainer.parts.append(PlacedPrompts(self._trainer, models, places, balance))

    def use_own_values(self) -> None:
        """Update the critic where verl computes values: the first mini-batch's own forward pass computes its values.
        The critic's workers must be of the class that host/update/critic/worker.py makes."""
        self._trainer.parts.append(CriticFirst(self._trainer, self._trainer.run_stage))

    def use_streamed_update(
        self, skip_zero_gradient: bool, metrics: Literal["stock", "computed"], deferred: bool
    ) -> None:
        """Train like `use_lean_update` with old log-probs of its own, and train groups that `fuse_train_next` names on
        the devices of released replicas while other replicas generate; `deferred`: the loss is a mean over the batch's
        tokens. The actor's workers must be of the class that host/update/stream/worker.py makes."""
        trainer, options = self._trainer, LeanOptions(skip_zero_gradient, True, metrics)
        streamed = assembly.streamed_updates(trainer, trainer.run_stage, trainer.inference, options, deferred)
        trainer.director.training = streamed
        trainer.parts.append(streamed)

    def use_deferred_critic(self) -> None:
        """Run the critic's update beside the stages that follow, until the values of the next step, which
        `fuse_infer_next` may stream once the update is done. Needs workers of its own (`fuse_devices`)."""
        trainer = self._trainer
        deferred = assembly.deferred_critic(trainer)
        trainer.director.apart = assembly.values_apart(trainer, deferred)
        trainer.parts.append(deferred)
