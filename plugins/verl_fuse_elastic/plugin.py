"""Hooks of the plugin `elastic`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.events import CheckpointSaved, Event, Generated, Polled, SetUp, StepBegun, StepEnded
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Migration, ReplicaView, RolloutView
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.generated import generated_share, generated_tokens
from verl_fuse_elastic.added import add
from verl_fuse_elastic.assignment import TOKENS_ALONE, assign, fewest_slots
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.contracts import CONTRACTS
from verl_fuse_elastic.features import FEATURES
from verl_fuse_elastic.learned import KEPT, ElasticHistory
from verl_fuse_elastic.ledger import cost_metrics, ledger
from verl_fuse_elastic.prediction import afterwards
from verl_fuse_elastic.prefixes import prefill_metrics
from verl_fuse_elastic.refusals import refusals
from verl_fuse_elastic.release import Release
from verl_fuse_elastic.scaler import Scaler


def standalone(host: Any, groups: Mapping[str, Any], **settings: Any) -> Any:
    """Return the part with replicas on devices of their own. They need verl, and are imported when they are made."""
    from verl_fuse_elastic.standalone.sync import with_pool

    return with_pool(host, groups, **settings)


class ElasticPlugin(Configured):
    """Assign, scale and release as `fuse.elastic` asks; answer nothing in a run that has `fuse.elastic` switched
    off."""

    HOOK_API = 2
    block, features, refused = ElasticConfig, FEATURES, staticmethod(refusals)

    def __init__(self) -> None:
        self._run: _Run | None = None

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return CONTRACTS

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: ElasticConfig = trainer.block("elastic")
        self._run = _Run(block, trainer) if block.enabled else None
        if block.enabled:
            trainer.use_routing(block.warm_prefix_tokens)
        if block.enabled and block.standalone:
            trainer.add_part(partial(standalone, most=block.standalone, launch_timeout=block.standalone_timeout))

    @hookimpl
    def fuse_predict(self, prompts: Sequence[Prompt]) -> Sequence[Prediction] | None:
        return None if self._run is None else self._run.learned.predictor.predict(prompts)

    @hookimpl
    def fuse_scale(self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int | None:
        return None if self._run is None else self._run.scale(prompts, replicas, most)

    @hookimpl
    def fuse_assign(
        self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
    ) -> Mapping[str, int] | None:
        return None if self._run is None else self._run.assign(prompts, replicas, running)

    @hookimpl
    def fuse_migration(self, view: RolloutView) -> Migration | None:
        return None if self._run is None else self._run.release.decide(view)

    @hookimpl
    def fuse_event(self, event: Event) -> None:
        if self._run is not None:
            self._run.observe(event)

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float] | None:
        return None if self._run is None else self._run.metrics(timeline)


class _Run:
    """The plugin's knowledge of a run: the lessons of earlier steps, the replicas of the run, and for the running step
    the quality of its predictions and the response tokens that the step trains."""

    def __init__(self, block: ElasticConfig, trainer: Trainer) -> None:
        views = trainer.replica_views()
        for key in ("min_replicas", "max_replicas"):
            if (wanted := getattr(block, key) or 0) > len(views) + block.standalone:
                more = f", and fuse.elastic.standalone={block.standalone}" if block.standalone else ""
                raise FuseError(f"fuse.elastic.{key}={wanted}: this run has {len(views)} rollout replicas{more}")
        self.learned = ElasticHistory()
        self._block, self._replicas, self._devices = block, len(views), trainer.devices_each
        self._capacity = min((view.capacity for view in views), key=lambda capacity: capacity.tokens)
        self._limit: float = trainer.config.actor_rollout_ref.rollout.response_length
        self.scaler, self.release = Scaler(block, len(views), self._limit), Release(block)
        self._calibration, self._tokens = {}, 0
        self._prompts: Mapping[str, Prompt] = {}
        self._lengths: Mapping[str, Sequence[int]] = {}

    def scale(self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], most: int) -> int:
        return self.scaler.decide(self.learned.shares.decoded(prompts), replicas, most, self.learned)

    def assign(
        self, prompts: Sequence[Prompt], replicas: Sequence[ReplicaView], running: Mapping[int, Sequence[Prompt]]
    ) -> Mapping[str, int]:
        shares = self.learned.shares
        prompts, running = shares.decoded(prompts), {rank: shares.decoded(left) for rank, left in running.items()}
        terms = fewest_slots(replicas), self.learned.decode or TOKENS_ALONE, self._limit
        ranks = [replica.rank for replica in replicas]
        return add(prompts, running, *terms) if any(running.values()) else assign(prompts, ranks, *terms)

    def observe(self, event: Event) -> None:
        match event:
            case SetUp(resumed_from=folder):
                self.learned = KEPT.load(folder, self._devices) or ElasticHistory()
            case StepBegun():
                self.scaler.begin_step()
                self.release, self._calibration = Release(self._block), {}
            case Polled(view=view):
                # The view counts the replicas, whichever plugin decided their number.
                self._replicas = len(view.replicas)
            case Generated(responses=responses, discarded=discarded, prompts=prompts):
                self._prompts, self._lengths = prompts, {**discarded, **responses}
                self._calibration = self.learned.learn_lengths(prompts, self._lengths)
                self._tokens = sum(map(sum, responses.values()))
                if discarded:
                    self.scaler.extend(self.learned.shares.decoded(prompts.values()))
                self.scaler.generated(self.learned.shares.decoded(afterwards(prompts, self._lengths)))
            case CheckpointSaved(folder=folder):
                self.learned.save(folder, self._devices)
            case StepEnded(timeline=timeline):
                self.scaler.end_step(self.learned.corrections)
                self.learned.learn_costs(timeline, self._capacity)
                self.learned.shares.learn(generated_tokens(timeline), self._prompts, self._lengths)

    def metrics(self, timeline: Timeline) -> Mapping[str, float]:
        found = {**prefill_metrics(timeline), **self._calibration}
        share = generated_share(generated_tokens(timeline).total(), sum(map(sum, self._lengths.values())))
        if share is not None:
            found["fuse/generated_share"] = share
        spent = ledger(timeline, self._replicas)
        if spent is None:
            return found
        cost = cost_metrics(timeline, spent, self._replicas, self._devices, self._block.price, self._tokens)
        foretold = self.scaler.metrics(timeline.step, spent, self._replicas, self._devices)
        return {**found, **cost, "fuse/elastic_without_room": float(self.release.without_room), **foretold}
