"""Chooses the migration threshold R_t and the number of survivors, by simulating the rollout on drawn lengths.

Invariants (tests/unit/simulate/test_threshold.py):
- threshold 0 (stock) is always a candidate, and wins unless another is predicted to save LEAST_GAIN of the stage;
- the choice is within 3 % of an exhaustive scan on six length distributions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.errors import FuseError
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.streamed import StreamedUpdate, streamed_tail
from verl_fuse.simulate.tail import (
    FusionResult,
    InferenceWork,
    MigrationCost,
    least_survivors,
    migrated,
    trigger_time,
    unmigrated,
)
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Ints

FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55)
"""Thresholds tried first, as shares of the batch."""
LEAST_GAIN = 0.01
REFINEMENTS = 2
"""Refinements around the best threshold found so far."""


@dataclass(frozen=True)
class Threshold:
    """Migrate when `threshold` samples are unfinished, to `survivors` replicas. Seconds: generation and inference, and
    the update where it is streamed, mean over draws."""

    threshold: int
    survivors: int
    seconds: float
    stock_seconds: float


class ThresholdScan:
    """Mean seconds over rollouts for any (threshold, survivors); remembers the paused rollouts, which survivors
    share. With an `update` that is streamed its seconds count too; `groups` has a number for each sample of each
    rollout."""

    def __init__(
        self,
        begun: Sequence[RolloutState],
        inference: InferenceWork,
        migration: MigrationCost,
        update: StreamedUpdate | None = None,
        groups: Sequence[Ints] = (),
    ):
        sizes = {(len(rollout.requests), rollout.replicas) for rollout in begun}
        if len(sizes) != 1:
            raise FuseError(f"rollouts of (samples, replicas) {sorted(sizes)}; needs at least one, all alike")
        ((self.samples, self.replicas),) = sizes
        self._inference, self._migration, self._update = inference, migration, update
        self._groups: Sequence[Ints | None] = groups or [None] * len(begun)
        self._begun = begun
        self._through = [rollout.advance() for rollout in begun]
        self._paused: dict[int, list[tuple[float, RolloutState]]] = {}
        self.stock_seconds = self._mean([unmigrated(rollout, inference) for rollout in self._through])

    def prepare(self, thresholds: Iterable[int]) -> None:
        """Pause every draw at each threshold, in one pass over time."""
        new = sorted(set(thresholds) - self._paused.keys(), reverse=True)
        self._paused.update({threshold: [] for threshold in new})
        for rollout, through in zip(self._begun, self._through, strict=True):
            for threshold in new:
                time = trigger_time(through, threshold)
                rollout = rollout.advance(time)
                self._paused[threshold].append((time, rollout))

    def least_survivors(self, threshold: int) -> int:
        """Return the fewest survivors that hold the tail in every draw."""
        return max(least_survivors(rollout) for _, rollout in self._paused[threshold])

    def seconds(self, threshold: int, survivors: int) -> float:
        """Return the mean seconds of generation and inference, and of an update that is streamed."""
        paused = self._paused[threshold]
        return self._mean([migrated(r, t, survivors, self._inference, self._migration) for t, r in paused])

    def _mean(self, found: Sequence[FusionResult]) -> float:
        return float(np.mean([self._seconds(one, group) for one, group in zip(found, self._groups, strict=True)]))

    def _seconds(self, fused: FusionResult, group: Ints | None) -> float:
        if self._update is None or group is None:
            return fused.seconds
        return streamed_tail(fused, group, self._update, self._inference).seconds


def best_threshold(
    draws: Sequence[Requests],
    replicas: int,
    timing: ReplicaTiming,
    inference: InferenceWork,
    migration: MigrationCost = MigrationCost(),  # noqa: B008 - frozen
    update: StreamedUpdate | None = None,
    groups: Sequence[Ints] = (),
) -> Threshold:
    """Choose R_t and the survivors for batches like `draws`, dealt out as verl does; see `ThresholdScan` for `update`
    and `groups`.

    Two draws of 4096 samples on 64 replicas take under 100 ms on one core.
    """
    begun = [RolloutState.begin(draw, timing, round_robin(len(draw), replicas)) for draw in draws]
    return search(ThresholdScan(begun, inference, migration, update, groups))


def search(scan: ThresholdScan) -> Threshold:
    """Return the best threshold and survivors found on a scan's rollouts; stock unless it gains LEAST_GAIN of the
    stage."""
    replicas = scan.replicas
    found: dict[tuple[int, int], float] = {}
    thresholds = {round(fraction * scan.samples) for fraction in FRACTIONS} - {0}
    for _ in range(1 + REFINEMENTS if replicas > 1 else 0):
        scan.prepare(thresholds)
        for threshold in thresholds:
            for survivors in _survivors(scan.least_survivors(threshold), replicas, found):
                if (threshold, survivors) not in found:
                    found[threshold, survivors] = scan.seconds(threshold, survivors)
        thresholds = _between(found, scan.samples)
    best = min(found, key=found.__getitem__, default=None)
    if best is None or found[best] > scan.stock_seconds * (1 - LEAST_GAIN):
        return Threshold(0, replicas, scan.stock_seconds, scan.stock_seconds)
    return Threshold(*best, found[best], scan.stock_seconds)


def _survivors(least: int, replicas: int, found: dict[tuple[int, int], float]) -> list[int]:
    """Return the numbers of survivors to try: at first powers of two times the least, then the neighbourhood of the
    best so far."""
    if found:
        best = min(found, key=found.__getitem__)[1]
        step = max(1, best // 4)
        wanted = {best - step, best, best + step}
    else:
        wanted = {least << power for power in range(replicas.bit_length())}
    return sorted(count for count in wanted if least <= count < replicas)


def _between(found: dict[tuple[int, int], float], samples: int) -> set[int]:
    """Return the best threshold and the middles between it and its neighbours."""
    if not found:
        return set()
    tried = sorted({0, samples - 1} | {threshold for threshold, _ in found})
    best = min(found, key=found.__getitem__)[0]
    at = tried.index(best)
    middles = {(best + other) // 2 for other in (tried[at - 1], tried[min(at + 1, len(tried) - 1)])}
    return ({best} | middles) - {0}
