"""Simulates an update in the tail (`fuse.update.stream`): devices of released replicas train on complete groups while
others generate.

Invariants (tests/unit/simulate/test_streamed.py):
- a group is trained on at most once before the end of generation, whole, after its last sample, on a released replica;
- no call begins once generation has ended, and all replicas train on the rest when the last call has ended;
- where nothing is released, or devices are shared and saturated, the update follows generation.

A call trains on one group. Inference that a group needs first is done by the same devices, and counts as part of it.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from verl_fuse.simulate.tail import FusionResult, InferenceWork, SampleWork
from verl_fuse.spec.arrays import Floats, Ints

NO_INFERENCE = InferenceWork(0.0)


@dataclass(frozen=True)
class StreamedUpdate(SampleWork):
    """Training on a sample, on one replica's devices, which hold a copy of the model.

    `end_seconds`: the end of the update once all samples are trained on, in seconds of all replicas: sums of gradients,
    and the optimizer step. `load_seconds` pass on a released replica before it can begin. `when_done`: a replica
    without requests is released; without it only the replicas that a migration frees. `dedicated`: see `InferenceWork`.
    """

    end_seconds: float = 0.0
    load_seconds: float = 0.0
    when_done: bool = True
    dedicated: bool = True


@dataclass(frozen=True, eq=False)
class StreamedTail:
    """`replica`, `start` and `end` of each call while others generate, in seconds from the start of the rollout.

    `ended`: when the last of them and generation have ended; `inference_left` and `left`: seconds of inference, and of
    the update with its end, on all replicas after that. `share` of the update's work that the calls did.
    """

    replica: Ints
    start: Floats
    end: Floats
    ended: float
    inference_left: float
    left: float
    share: float

    @property
    def seconds(self) -> float:
        """Return the seconds from the start of the rollout to the end of the update."""
        return self.ended + self.inference_left + self.left


def streamed_tail(
    fused: FusionResult,
    group: Ints,
    update: StreamedUpdate,
    inference: InferenceWork = NO_INFERENCE,
    replicas: int | None = None,
) -> StreamedTail:
    """Stream the update of a finished rollout; `group`: a number for each sample; `replicas`: the number of replicas,
    if not all of them generated."""
    rollout, released = fused.rollout, _released(fused, update, replicas or fused.rollout.replicas)
    count, replicas, end = int(group.max()) + 1, len(released), rollout.seconds
    complete, training, inferring = np.zeros(count), np.zeros(count), np.zeros(count)
    np.maximum.at(complete, group, rollout.finish)
    np.add.at(training, group, update.work(rollout.requests))
    np.add.at(inferring, group, inference.work(rollout.requests))
    order = np.argsort(complete, kind="stable")
    work = training + inferring * inference.slice_factor
    replica, start, ended = _calls(complete[order], work[order], released, end)
    called = replica >= 0
    rest = np.ones(count, bool)
    rest[order[called]] = False
    done = 1 - training[rest].sum() / training.sum() if training.any() else 0.0
    return StreamedTail(
        replica=replica[called],
        start=start[called],
        end=ended[called],
        ended=max(end, float(ended[called].max(initial=0.0))),
        inference_left=float(inferring[rest].sum()) / replicas,
        left=float(training[rest].sum()) / replicas + update.end_seconds,
        share=float(done),
    )


def _released(fused: FusionResult, update: StreamedUpdate, replicas: int) -> Floats:
    """Return the time at which each replica's devices can begin to train; infinite for replicas that generate to the
    end."""
    times = np.full(replicas, np.inf)
    if not update.dedicated:
        return times
    if update.when_done:
        times[:] = 0.0
        times[: fused.rollout.replicas] = fused.rollout.clocks
    times[np.setdiff1d(np.arange(fused.rollout.replicas), fused.survivors)] = fused.release
    return times + update.load_seconds


@njit(cache=True, nogil=True)
def _calls(complete, work, released, end):
    """Return (replica, start, end) of the call of each group, complete at these ascending times; replica -1: none."""
    count, free = len(complete), released.copy()
    replica, start, ended = np.full(count, -1), np.zeros(count), np.zeros(count)
    for i in range(count):
        first = np.argmin(free)
        begin = max(free[first], complete[i])
        if begin >= end:
            # Later groups are complete later, and no replica is free earlier.
            break
        replica[i], start[i], ended[i] = first, begin, begin + work[i]
        free[first] = ended[i]
    return replica, start, ended
