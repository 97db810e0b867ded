"""Make the choice of a run with `critic: auto` when the run starts, log it with its prediction, and look at it again
after every step."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_fuse.hookspecs import Trainer
from verl_fuse.spec.composed import ROLLOUT, Get, replica_devices
from verl_fuse.spec.events import CheckpointSaved, Event, StepEnded
from verl_fuse_placement.auto import Pool, choose, is_better, predict
from verl_fuse_placement.learned import KEPT, CriticMemory, PlacementHistory
from verl_fuse_placement.refusals import DEFER, MOST_REPLICAS, PLACED, candidates, keys_of, replicas_of

logger = logging.getLogger(__name__)


class PlacementChoice:
    """The critic's devices for a run with the composed configuration that `get` reads, which goes on from the
    checkpoint in `folder`."""

    def __init__(self, get: Get, folder: Path | None) -> None:
        each, replicas = replica_devices(get), replicas_of(get)
        engine_share = float(get(f"{ROLLOUT}.gpu_memory_utilization") or 0.0)
        self.pool = Pool(replicas, each, min(get(MOST_REPLICAS) or replicas, replicas), engine_share)
        self._candidates = [apart for apart, refused in candidates(get).items() if not refused]
        self.learned = KEPT.load(folder, each) or PlacementHistory(replicas)
        if self.learned.replicas != replicas:
            self.learned = PlacementHistory(replicas)
        self.predicted = predict(self.learned, self.pool, self._candidates)
        self.apart = choose(self.predicted)
        self._warned: int | None = None
        self.keys: Mapping[str, Any] = keys_of(get, self.apart) if self.apart else {PLACED: None, DEFER: False}

    def set_up(self, trainer: Trainer) -> None:
        """Say the choice; measure what the next choice needs of this run's devices."""
        views = trainer.replica_views()
        self.learned.capacity = min((view.capacity for view in views), key=lambda capacity: capacity.tokens)
        ranks = trainer.training_memory()["critic"]
        self.learned.memory = CriticMemory(sum(ranks[0].parameters), ranks[0].device)
        logger.info(
            "fuse.placement.critic=auto: the critic is %s; %s",
            self._where(self.apart),
            f"seconds of a step predicted from {len(self.learned.steps)} steps: {self._told(self.predicted)}"
            if self.predicted
            else "no step of this run has been measured yet, a restart from a checkpoint chooses by its own steps",
        )

    def observe(self, event: Event) -> None:
        """Learn from an event; warn once of each better placement than that of this run."""
        match event:
            case CheckpointSaved(folder=folder):
                self.learned.save(folder, self.pool.each)
            case StepEnded(timeline=timeline, lengths=lengths):
                self.learned.learn(timeline, lengths)
                self._compare(timeline.step)

    def metrics(self) -> dict[str, float]:
        """Return the critic's own devices, and the predicted seconds of a step with them."""
        found = {"fuse/placement_devices": float(self.apart * self.pool.each)}
        if self.predicted:
            found["fuse/placement_predicted_seconds"] = self.predicted[self.apart]
        return found

    def _compare(self, step: int) -> None:
        now = predict(self.learned, self.pool, self._candidates)
        if self.apart not in now:
            return
        best = choose(now)
        if is_better(now, best, self.apart) and best != self._warned:
            self._warned = best
            logger.warning(
                "fuse.placement.critic=auto: after step %d a step is predicted to take %s; this run goes on with the "
                "critic %s, a restart from a checkpoint would take it %s",
                step, self._told(now), self._where(self.apart), self._where(best),
            )  # fmt: skip

    def _told(self, predicted: Mapping[int, float]) -> str:
        return ", ".join(f"{seconds:.2f} s {self._where(apart)}" for apart, seconds in predicted.items())

    def _where(self, apart: int) -> str:
        if not apart:
            return "beside the actor"
        devices = apart * self.pool.each
        first = self.pool.replicas * self.pool.each - devices
        return f"on device {first}" if devices == 1 else f"on devices {first} to {first + devices - 1}"
