"""Simulates the inter-stage fusion of one rollout: the long tail moves to few replicas, the freed ones run inference on
finished samples (RLHFuse, section 4).

Invariants (tests/unit/simulate/test_tail.py):
- every request finishes exactly once, with or without migration;
- threshold 0 is stock: generation as if nothing were watched, inference after it on all replicas;
- inference never ends before its work could have been done by all the capacity there was, nor before the last sample
  was generated.

Capacity for inference is counted in replicas: none before the release (or the measured headroom of busy devices), then
the freed ones, then all. Work is handed out sample by sample and conserved, so its end follows from arrivals and
capacity alone.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.errors import FuseError
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.spec.arrays import Floats, Ints


@dataclass(frozen=True)
class SampleWork:
    """Work on one sample of n tokens: `per_token * n + per_square * n**2` seconds of one replica's devices."""

    per_token: float
    per_square: float = 0.0

    def work(self, requests: Requests) -> Floats:
        """Return the replica-seconds of each sample."""
        tokens = requests.tokens.astype(np.float64)
        return self.per_token * tokens + self.per_square * tokens * tokens


@dataclass(frozen=True)
class InferenceWork(SampleWork):
    """Inference on a finished sample, all models together.

    `slice_factor`: how much longer a freed replica takes for micro-groups than all devices together for the whole
    batch, per sample. `load_seconds` pass on a freed replica before it can begin; `last_seconds` is the least time from
    the last sample to the end: it is alone on a replica. `headroom`: share of a generating replica that inference can
    use without slowing generation, 0 unless measured. `dedicated` is False where replicas share saturated devices: the
    work that a freed replica could do is then done by the others already.
    """

    slice_factor: float = 1.0
    load_seconds: float = 0.0
    last_seconds: float = 0.0
    headroom: float = 0.0
    dedicated: bool = True

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square", "load_seconds", "last_seconds", "headroom"):
            if not getattr(self, name) >= 0:
                raise FuseError(f"inference {name}={getattr(self, name)}: needs a number >= 0")
        if not self.slice_factor > 0:
            raise FuseError(f"inference slice_factor={self.slice_factor}: needs a number > 0")


@dataclass(frozen=True)
class MigrationCost:
    """Moving a running request: `latency` seconds to cut, abort and send it; then its context is prefilled again, or,
    with `seconds_per_token`, received at that speed, one request after the other on each destination."""

    latency: float = 0.0
    seconds_per_token: float | None = None


@dataclass(frozen=True, eq=False)
class FusionResult:
    """The outcome of a migration; seconds from the start of the rollout. `survivors` are the replicas that kept
    generating, `moved` the number of requests that changed their replica."""

    rollout: RolloutState
    release: float
    generation_end: float
    inference_end: float
    survivors: Ints
    moved: int

    @property
    def seconds(self) -> float:
        return max(self.generation_end, self.inference_end)


def trigger_time(through: RolloutState, threshold: int) -> float:
    """Return the time at which only `threshold` requests are unfinished, from a rollout that ran through."""
    count = len(through.requests)
    return float(np.partition(through.finish, count - threshold - 1)[count - threshold - 1])


def least_survivors(paused: RolloutState) -> int:
    """Return the fewest replicas whose batch slots and memory hold all unfinished requests (section 4.2)."""
    left = np.isnan(paused.finish)
    context = int((paused.requests.prompt[left] + paused.done[left]).sum() + left.sum())
    timing = paused.timing
    return max(1, -(-int(left.sum()) // timing.max_batch), -(-context // timing.kv_capacity))


def unmigrated(through: RolloutState, inference: InferenceWork) -> FusionResult:
    """Return the result without migration: inference after generation, on all replicas."""
    end, work = through.seconds, float(inference.work(through.requests).sum())
    inferred = end + work / through.replicas if work else end
    return FusionResult(through, end, end, inferred, np.arange(through.replicas), 0)


def migrated(
    paused: RolloutState, trigger: float, survivors: int, inference: InferenceWork, migration: MigrationCost
) -> FusionResult:
    """Go on from the rollout paused at `trigger` with the `survivors` replicas that have most left to do."""
    if not 1 <= survivors < paused.replicas:
        raise FuseError(f"survivors={survivors}: needs 1 to {paused.replicas - 1} of {paused.replicas} replicas")
    stays = _busiest(paused, survivors)
    rollout, moved = moved_to(paused, stays, trigger, migration)
    rollout = rollout.advance()
    kept, freed = np.flatnonzero(stays), np.flatnonzero(~stays)
    release = float(paused.clocks[freed].clip(min=trigger).max()) + inference.load_seconds
    end = rollout.seconds
    work = inference.work(rollout.requests)
    order = np.argsort(rollout.finish)
    early = inference.headroom if inference.dedicated else 0.0
    inferred = inference_end(
        rollout.finish[order], work[order], min(release, end), end,
        early * paused.replicas,
        (len(freed) / inference.slice_factor if inference.dedicated else 0.0) + early * survivors,
        float(paused.replicas),
    )  # fmt: skip
    last = inference.last_seconds if work.any() else 0.0
    return FusionResult(rollout, release, end, max(inferred, end + last), kept, len(moved))


@njit(cache=True, nogil=True)
def inference_end(finish, work, release, end, before, between, after):
    """Return the time at which all `work` (replica-seconds, ready at the ascending times `finish`) is done with
    `before` replicas until `release`, `between` until `end`, `after` from then on."""
    at_release = before * release
    at_end = at_release + between * (end - release)
    left, latest = work.sum(), 0.0
    for i in range(len(finish)):
        t = finish[i]
        reached = before * t if t <= release else at_release + between * (t - release) if t <= end else at_end
        latest = max(latest, reached + left)
        left -= work[i]
    if latest > at_end:
        return end + (latest - at_end) / after
    return end


@njit(cache=True, nogil=True)
def _remaining(queues, offsets, finish, context):
    """Return the number of unfinished requests of each replica, and their context tokens."""
    replicas = len(offsets) - 1
    counts, tokens = np.zeros(replicas, np.int64), np.zeros(replicas, np.int64)
    for r in range(replicas):
        for i in queues[offsets[r] : offsets[r + 1]]:
            if np.isnan(finish[i]):
                counts[r] += 1
                tokens[r] += context[i]
    return counts, tokens


@njit(cache=True, nogil=True)
def _requeue(queues, offsets, heads, finish, counts, stays):
    """Return new (queues, offsets, heads) with each replica's own unfinished requests in order, then the requests moved
    to it, least loaded first; also the moved requests, their targets, and whether each was running, that is, had its
    context in memory."""
    replicas = len(heads)
    moved = np.empty(len(queues), np.int64)
    target = np.empty(len(queues), np.int64)
    was_running = np.empty(len(queues), np.bool_)
    kept = np.flatnonzero(stays)
    load = counts[kept]
    sizes = np.zeros(replicas, np.int64)
    sizes[kept] = load
    total = 0
    for r in range(replicas):
        if stays[r]:
            continue
        for position in range(offsets[r], offsets[r + 1]):
            i = queues[position]
            if np.isnan(finish[i]):
                was_running[total] = position - offsets[r] < heads[r]
                least = np.argmin(load)
                load[least] += 1
                moved[total], target[total] = i, kept[least]
                sizes[kept[least]] += 1
                total += 1
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    result, filled, running = np.empty(ends[-1], np.int64), ends[:-1].copy(), np.zeros(replicas, np.int64)
    for r in kept:
        for position in range(offsets[r], offsets[r + 1]):
            i = queues[position]
            if np.isnan(finish[i]):
                result[filled[r]] = i
                filled[r] += 1
                running[r] += position - offsets[r] < heads[r]
    for k in range(total):
        result[filled[target[k]]] = moved[k]
        filled[target[k]] += 1
    return result, ends, running, moved[:total], target[:total], was_running[:total]


def _busiest(paused: RolloutState, survivors: int) -> NDArray[np.bool_]:
    """Tell of each replica whether it is one of the `survivors` that have most left to do."""
    context = paused.requests.prompt + paused.done
    counts, tokens = _remaining(paused.queues, paused.offsets, paused.finish, context)
    stays = np.zeros(paused.replicas, bool)
    stays[np.lexsort((-tokens, -counts))[:survivors]] = True
    return stays


def moved_to(
    paused: RolloutState, stays: NDArray[np.bool_], trigger: float, migration: MigrationCost
) -> tuple[RolloutState, Ints]:
    """Return the paused rollout with every unfinished request on a replica that `stays`; finished requests stand in no
    queue. Also return the moved requests."""
    context = paused.requests.prompt + paused.done
    counts, _ = _remaining(paused.queues, paused.offsets, paused.finish, context)
    queues, offsets, heads, moved, target, was_running = _requeue(
        paused.queues, paused.offsets, paused.heads, paused.finish, counts, stays
    )
    cached, arrival = paused.cached.copy(), paused.arrival.copy()
    cached[moved] = 0
    arrival[moved] = trigger + migration.latency
    if migration.seconds_per_token is not None:
        cached[moved[was_running]] = context[moved[was_running]]
        for replica in np.unique(target):
            here = moved[(target == replica) & was_running]
            arrival[here] += np.cumsum(context[here]) * migration.seconds_per_token
    return replace(paused, queues=queues, offsets=offsets, heads=heads, cached=cached, arrival=arrival), moved
