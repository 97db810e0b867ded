"""Directs the running rollout: shows policies a view of the rollout, and carries out their decisions.

At every look at the rollout (watch.py) the policies get a view of it, and may free replicas and hand finished samples
to lanes. Before prompts are submitted their routing is planned.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from verl_fuse.errors import FuseError
from verl_fuse.host.inference.apart import InferenceApart
from verl_fuse.host.inference.samples import SampleInference
from verl_fuse.host.record.journal import Journal
from verl_fuse.host.record.step import TrainerPart
from verl_fuse.host.rollout.finished import Finished
from verl_fuse.host.rollout.policy import PolicyGuard
from verl_fuse.host.rollout.prompts import samples_of, sources_of
from verl_fuse.host.rollout.replicas import Replicas
from verl_fuse.host.rollout.routing import Routing
from verl_fuse.host.rollout.watch import Glance, RolloutObserver, RolloutWatch
from verl_fuse.spec.events import Migrated, Polled, Submitted
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.step import LaneView, Migration, ReplicaView, RolloutView, Sample, Stage
from verl_fuse.spec.trajectory import TrajectoryKey


class StockRouting:
    """The routing without a plan: verl's load balancer alone decides. Has the methods of `Routing`."""

    by_prompt = False
    prompts: Mapping[str, Prompt] = {}

    def begin_step(self) -> None:
        """Begin a step without a plan."""

    def submit(self, batch: TensorDict, policy: PolicyGuard, watch: RolloutWatch, ended: Any = ()) -> None:
        """Plan nothing."""

    def upper_response(self, finished: Finished, discarded: Any, ended: Any = ()) -> None:
        """Predict nothing."""

    def annotate(
        self, views: tuple[ReplicaView, ...], finished: Finished, discarded: Any, ended: Any = ()
    ) -> tuple[ReplicaView, ...]:
        """Assign nothing."""
        return views


class StockTraining:
    """The training without a stream: no group is trained while others generate. Has the methods of
    `StreamedUpdates`."""

    def views(self, released: Collection[int]) -> tuple[LaneView, ...]:
        """Return no lane."""
        return ()

    def complete(self, watch: RolloutWatch) -> tuple[Sample, ...]:
        """Return no group."""
        return ()

    def stream(self, keys: Sequence[str], tags: Mapping[str, dict], lane: str) -> None:
        """Do nothing: there is no lane."""


class Director(RolloutObserver):
    """Directs the rollout of each step of the `journal`; `parts` are the trainer's."""

    def __init__(
        self,
        journal: Journal,
        policy: PolicyGuard,
        replicas: Replicas,
        inference: SampleInference,
        parts: Sequence[TrainerPart],
    ):
        self._journal, self.policy, self._replicas, self._inference = journal, policy, replicas, inference
        self._parts = parts
        self._glance = Glance()
        # The record, and its number of forgotten trajectories, of which no sample in inference is gone.
        self._whole: tuple[Any, int] = (None, 0)
        self.routing: Routing | StockRouting = StockRouting()
        self.training: Any = StockTraining()
        # Of a model with workers of its own.
        self.apart: InferenceApart | None = None

    def begin_step(self) -> None:
        """Act on the start of a step in the journal."""
        for inference in self.inferences:
            inference.begin_step()
        self.routing.begin_step()
        self.policy.begin_step(self._journal.step.number)

    def submit(self, batch: TensorDict, watch: RolloutWatch) -> None:
        """Act before prompts of the step are submitted: its first prompts, or more of them."""
        step = self._journal.step
        step.sources |= sources_of(batch)
        step.ask(samples_of(batch, step.samples_each))
        self._journal.emit(Submitted, prompts=Counter(step.sources.values()))
        self._replicas.expect(self._expected(watch))
        self.routing.submit(batch, self.policy, watch, watch.missing(step.samples_of))

    def look(self, watch: RolloutWatch) -> None:
        """Ask the policies for their decisions now."""
        for part in self._parts:
            part.check()
        finished = watch.finished
        self._require_rows(watch)
        self._inference.check()
        seen = (len(finished), *watch.groups, self._lanes, self._lanes_apart, self._training_lanes)
        if not self._glance.due(seen):
            return
        self._expect(watch)
        view = self._view(watch, self._replicas.watched())
        self._journal.emit(Polled, view=view)
        if migration := self.policy.migration(view):
            self.migrate(migration, view)
            view = self._view(watch, self._replicas.views())
        for number in range(len(view.lanes)):
            while keys := self.policy.infer_next(view, view.lanes[number]):
                self._inference.submit(keys, finished.tags, view.lanes[number].name)
                finished.take(keys)
                view = replace(view, ready=finished.ready, lanes=self._lanes)
        self._infer_apart(view, finished)
        self._train(view, watch)

    def discard(self, keys: Collection[str]) -> None:
        for each in (*self.inferences, *self._parts):
            each.discard(keys)

    def suspects(self, watch: RolloutWatch) -> list[str]:
        return self._replicas.suspects()

    def finish(self, tags: Mapping[str, dict]) -> None:
        """Hand the rest of the batch to the lanes, and wait until they have done everything."""
        self._inference.submit_rest(tags)
        self._inference.drain()
        if self.apart is not None:
            self.apart.inference.finish()

    def inference_of(self, stage: Stage) -> SampleInference | None:
        """Return what finished samples go through in a stage; None: nothing is computed of a sample before the batch is
        complete."""
        return next((inference for inference in self.inferences if stage in inference.stages), None)

    @property
    def inferences(self) -> tuple[SampleInference, ...]:
        """Return all that finished samples go through."""
        return (self._inference, *(() if self.apart is None else (self.apart.inference,)))

    def _infer_apart(self, view: RolloutView, finished: Finished) -> None:
        while self.apart is not None and (lanes := self._lanes_apart):
            inference = self.apart.inference
            view = replace(view, ready=finished.besides(inference.taken), lanes=lanes)
            if not (keys := self.policy.infer_next(view, lanes[0])):
                return
            inference.submit(keys, finished.tags)

    def _train(self, view: RolloutView, watch: RolloutWatch) -> None:
        for number in range(len(self._training_lanes)):
            while keys := self.policy.train_next(view, self._training_lanes[number]):
                self.training.stream(keys, watch.finished.tags, self._training_lanes[number].name)
                view = replace(view, complete=self.training.complete(watch))

    def migrate(self, migration: Migration, view: RolloutView) -> None:
        """Leave the rollout to the survivors, if they live."""
        freed = sorted({seen.rank for seen in view.replicas if seen.routed} - set(migration.survivors))
        moving = any(seen.running for seen in view.replicas if seen.rank in freed)
        if moving and not self._replicas.all_live(migration.survivors):
            return
        self._replicas.free(freed, migration.cause)
        stopped = tuple(rank for rank in freed if rank in self._replicas.freed)
        self._journal.emit(Migrated, view=view, survivors=migration.survivors, freed=stopped)

    def _require_rows(self, watch: RolloutWatch) -> None:
        """Raise a FuseError where a sample that a lane was given is gone: samples stay until their group is discarded
        in the watch's sight. A record that has forgotten nothing since the last look needs no other look."""
        if self._whole == (seen := (watch.finished, watch.finished.forgotten)):
            return
        taken = frozenset().union(*(inference.taken for inference in self.inferences))
        gone = taken.difference(watch.finished.tags)
        lost = sorted(key for key in gone if TrajectoryKey.parse(key).uid not in watch.discarded)
        if lost:
            raise FuseError(
                f"step {self._journal.step.number}: {len(lost)} samples were dropped while they were in inference, "
                f"first {lost[0]}: a sampler of "
                "your own drops groups through ReplayBuffer._clear_groups (trainer.v1.sampler.custom_sampler)"
            )
        self._whole = seen

    def _expect(self, watch: RolloutWatch) -> None:
        """Set the expected lengths of the unfinished samples, which decide for how many of them a replica has room."""
        finished, missing = watch.finished, watch.missing(self._journal.step.samples_of)
        upper = self.routing.upper_response(finished, watch.discarded, missing)
        unfinished = self._expected(watch) - finished.samples - sum(missing.values())
        self._replicas.expect(max(0, unfinished), finished.lengths, upper)

    def _expected(self, watch: RolloutWatch) -> int:
        return self._journal.step.expected(watch.discarded)

    @property
    def _lanes(self) -> tuple[LaneView, ...]:
        return self._inference.view(self._replicas.freed)

    @property
    def _lanes_apart(self) -> tuple[LaneView, ...]:
        return () if self.apart is None else self.apart.views(self._replicas.freed)

    @property
    def _training_lanes(self) -> tuple[LaneView, ...]:
        return self.training.views(self._replicas.freed)

    def _view(self, watch: RolloutWatch, replicas: tuple[ReplicaView, ...]) -> RolloutView:
        groups = watch.groups
        finished = watch.finished
        step = self._journal.step
        missing = watch.missing(step.samples_of)
        return RolloutView(
            step=step.number,
            elapsed=step.clock.now - step.clock.start,
            expected=self._expected(watch),
            finished=finished.samples,
            groups=groups.known,
            groups_finished=groups.finished + groups.failed,
            ready=finished.ready,
            lanes=self._lanes,
            replicas=self.routing.annotate(replicas, finished, watch.discarded, missing),
            complete=self.training.complete(watch),
            missing=sum(missing.values()),
        )
