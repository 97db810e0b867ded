"""Simulates an elastic replica count: prompts of similar predicted length share a replica, early replicas hand on their
rest and give their devices back.

Reconstructed from RLHFless (arXiv 2602.22718). Invariants (tests/unit/simulate/test_elastic.py):
- every request stands in exactly one queue, the samples of a prompt in the same one, and each prompt is prefilled once
  per replica;
- a replica is cut at most once, and its rest goes only to replicas that still run;
- a replica holds its devices from the start until its last request has finished or left.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.rollout import Requests, RolloutState
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints

BALANCES = (None, 0.0, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class ElasticResult:
    """`ends`: when each replica gave its devices back. `moved` requests changed their replica."""

    rollout: RolloutState
    ends: Floats
    moved: int

    @property
    def seconds(self) -> float:
        return self.rollout.seconds


@dataclass(frozen=True)
class ReplicaAssignment:
    """`replicas` to run; prompts are sorted by predicted length and cut into runs of equal sums of `length ** balance`.

    0: equal counts, as published; 1: equal tokens, so that long ones run in small batches. None: dealt out one prompt
    after the other. `fraction`: share of its requests after which a replica hands on the rest; 1: never.
    """

    replicas: int
    balance: float | None
    fraction: float = 1.0


def queues_of(assignment: ReplicaAssignment, predicted: Ints, group: Ints) -> list[Ints]:
    """Return the requests of each replica, the longest first."""
    prompts, first = np.unique(group, return_index=True)
    if assignment.balance is None:
        replica = np.arange(len(prompts)) % assignment.replicas
    else:
        order = np.argsort(-predicted[first], kind="stable")
        weight = predicted[first][order].astype(np.float64) ** assignment.balance
        middle = (np.cumsum(weight) - weight / 2) / weight.sum()
        replica = np.empty(len(prompts), np.int64)
        replica[order] = np.minimum((middle * assignment.replicas).astype(np.int64), assignment.replicas - 1)
    home = replica[np.searchsorted(prompts, group)]
    longest_first = np.lexsort((np.arange(len(group)), group, -predicted))
    return [longest_first[home[longest_first] == r] for r in range(assignment.replicas)]


def shared_prefixes(prompt: Ints, group: Ints, queues: list[Ints]) -> Ints:
    """Return the prompt tokens that another sample of the same prompt on the same replica has prefilled: all but the
    last token, which every sample needs."""
    order = np.concatenate(queues)
    replica = np.repeat(np.arange(len(queues)), [len(queue) for queue in queues])
    _, first = np.unique(replica * (int(group.max()) + 1) + group[order], return_index=True)
    cached = np.maximum(prompt - 1, 0)
    cached[order[first]] = 0
    return cached


def begin(lengths: DrawnLengths, timing: ReplicaTiming, queues: list[Ints]) -> RolloutState:
    """Begin the rollout of a step; each prompt is prefilled once per replica."""
    cached = shared_prefixes(lengths.prompt, lengths.group, queues)
    return RolloutState.begin(Requests.of(lengths.prompt, lengths.response, cached), timing, queues)


def cut_and_migrate(rollout: RolloutState, fraction: float, latency: float) -> ElasticResult:
    """Run to the end; a replica that has finished `fraction` of its requests hands the rest to running replicas with
    free slots."""
    replicas = rollout.replicas
    sizes = np.diff(rollout.offsets)
    running, cut, moved = sizes > 0, np.zeros(replicas, bool), 0
    ends = np.zeros(replicas)
    state = rollout
    while fraction < 1:
        through = state.advance()
        home = through.replica_of
        times = np.full(replicas, np.inf)
        for r in np.flatnonzero(running & ~cut):
            finishes = np.sort(through.finish[home == r])
            needed = max(1, int(np.ceil(fraction * len(finishes))))
            if needed < len(finishes):
                times[r] = finishes[needed - 1]
        r = int(np.argmin(times))
        if not np.isfinite(times[r]):
            break
        cut[r] = True
        state = state.advance(times[r])
        changed = _hand_over(state, r, running, latency)
        if changed is None:
            continue
        state, count = changed
        moved += count
        running[r] = False
        ends[r] = state.clocks[r]
    done = state.advance()
    home = done.replica_of
    for r in np.flatnonzero(running):
        own = done.finish[home == r]
        ends[r] = own.max() if len(own) else 0.0
    return ElasticResult(done, ends, moved)


def _hand_over(
    state: RolloutState, source: int, running: NDArray[np.bool_], latency: float
) -> tuple[RolloutState, int] | None:
    """Hand the unfinished requests of `source` to the other running replicas; return None where these have too few free
    slots."""
    home, left = state.replica_of, np.isnan(state.finish)
    load = np.bincount(home[left], minlength=state.replicas)
    others = np.flatnonzero(running & (load > 0))
    others = others[others != source]
    moving = np.flatnonzero(left & (home == source))
    free = np.maximum(state.timing.max_batch - load[others], 0)
    if len(moving) == 0 or free.sum() < len(moving):
        return None
    target = np.empty(len(moving), np.int64)
    for k in range(len(moving)):
        target[k] = others[np.argmin(load[others])]
        load[target[k]] += 1
    cached, arrival = state.cached.copy(), state.arrival.copy()
    cached[moving] = 0
    arrival[moving] = state.clocks[source] + latency
    queues = [state.queue(r) for r in range(state.replicas)]
    queues[source] = queues[source][np.isfinite(state.finish[queues[source]])]
    queues = [np.concatenate([queue, moving[target == r]]) for r, queue in enumerate(queues)]
    heads = state.heads.copy()
    heads[source] = len(queues[source])
    offsets = np.concatenate([[0], np.cumsum([len(queue) for queue in queues])]).astype(np.int64)
    flat = np.concatenate(queues).astype(np.int64)
    later = replace(state, queues=flat, offsets=offsets, heads=heads, cached=cached, arrival=arrival)
    return later, len(moving)


def run_elastic(
    lengths: DrawnLengths, timing: ReplicaTiming, assignment: ReplicaAssignment, options: SimulationOptions
) -> ElasticResult:
    """Assign by predicted lengths, generate the real ones."""
    rollout = begin(lengths, timing, queues_of(assignment, lengths.predicted, lengths.group))
    return cut_and_migrate(rollout, assignment.fraction, options.migration_latency)


def best_assignment(
    lengths: DrawnLengths, timing: ReplicaTiming, most: int, options: SimulationOptions
) -> ReplicaAssignment:
    """Return the assignment with the least weighted sum of time and device time, both relative to all replicas with
    prompts dealt out.

    `lengths` are past ones: predictions err here as much as they will.
    """
    counts = sorted({most, *(max(1, round(most * share / 8)) for share in range(1, 8))})
    fractions = sorted({options.cut_fraction, 1.0})
    candidates = [ReplicaAssignment(*choice) for choice in product(counts, BALANCES, fractions)]
    found = {c: run_elastic(lengths, timing, c, options) for c in candidates}
    reference = found[ReplicaAssignment(most, None)]

    def objective(candidate: ReplicaAssignment) -> float:
        run = found[candidate]
        time = run.seconds / reference.seconds
        cost = float(run.ends.sum() / reference.ends.sum())
        return options.time_weight * time + (1 - options.time_weight) * cost

    return min(candidates, key=objective)
