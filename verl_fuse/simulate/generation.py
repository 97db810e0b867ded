"""Simulates the generation of one step under a set of features, and the inference that goes with it.

Invariants (tests/unit/simulate/test_generation.py):
- without features the samples run as verl deals them out, and nothing is inferred before generation ends;
- `inference` is absent unless inference was taken into the stage; `held` never exceeds replicas times the stage's
  seconds.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from verl_fuse.cost.model import CostModel
from verl_fuse.simulate.calls import freed_inference, migration_cost
from verl_fuse.simulate.draw import DrawnLengths, draw
from verl_fuse.simulate.elastic import ReplicaAssignment, best_assignment, run_elastic, shared_prefixes
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import replica_count, replica_timing
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.streamed import NO_INFERENCE, StreamedTail, StreamedUpdate, streamed_tail
from verl_fuse.simulate.tail import FusionResult, InferenceWork, migrated, trigger_time
from verl_fuse.simulate.tail import unmigrated as without_migration
from verl_fuse.simulate.threshold import Threshold, ThresholdScan, search
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.workload import Call, Workload

THRESHOLD_BATCHES = 2
"""Batches on which the threshold is chosen; it then holds for other batches, as at run time."""


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """`fused` is the rollout; `end` when the driver sees generation ended; `inference_end` set when the stage did the
    inference too.

    `replicas` there are; `held`: replica-seconds of their devices until given back;
    `paused`: the rollout when the tail moved; `streamed`: the update, where it is trained in copies.
    """

    fused: FusionResult
    paused: RolloutState | None
    end: float
    inference_end: float | None
    replicas: int
    held: float
    streamed: StreamedTail | None = None


def generate(
    workload: Workload,
    plan: Plan,
    cost: CostModel,
    features: frozenset[str],
    lengths: DrawnLengths,
    calls: tuple[Call, ...],
    options: SimulationOptions,
    update: StreamedUpdate | None = None,
) -> GenerationResult:
    """Run the rollout. `calls`: inference calls that freed replicas may take over; they are left alone without
    `interstage`. `update`: training in copies, streamed as far as replicas are released before the end."""
    if "speculation" not in features:
        options = replace(options, acceptance=None)
    generate_plan = plan.call("actor_generate")
    timing = replica_timing(workload, generate_plan, cost, options)
    replicas = plan.replicas or replica_count(generate_plan.layout)
    poll = options.fuse_poll if features else options.stock_poll
    elastic = "elastic" in features

    def result(fused: FusionResult, end: float, held: float) -> GenerationResult:
        tail = None if update is None else streamed_tail(fused, lengths.group, update, replicas=replicas)
        return GenerationResult(fused, None, _seen(end, poll), None, replicas, held, tail)

    if "interstage" in features and replicas > 1:
        chosen, inference = chosen_threshold(workload, plan, cost, elastic, calls, options, update)
        requests, queues = _dealt(lengths, replicas, elastic)
        begun = RolloutState.begin(requests, timing, queues)
        through = begun.advance()
        if chosen.threshold:
            time = trigger_time(through, chosen.threshold)
            paused = begun.advance(time)
            fused = migrated(paused, time, chosen.survivors, inference, migration_cost(workload, plan, cost, options))
            end, tail = _seen(fused.generation_end, poll), None
            inferred = max(fused.seconds, end) if calls else None
            if update is not None:
                tail = streamed_tail(fused, lengths.group, update, inference)
                inferred = max(tail.ended + tail.inference_left, end) if calls else None
            until = inferred or end
            held = float(_ends(fused, until).sum()) if elastic else replicas * until
            return GenerationResult(fused, paused, end, inferred, replicas, held, tail)
    elif elastic:
        run = run_elastic(lengths, timing, chosen_assignment(workload, timing, replicas, options), options)
        fused = without_migration(run.rollout, NO_INFERENCE)
        return result(fused, run.seconds, float(run.ends.sum()))
    else:
        requests, queues = _dealt(lengths, replicas, elastic)
        through = RolloutState.begin(requests, timing, queues).advance()
    held = float(through.clocks.sum()) if elastic else replicas * _seen(through.seconds, poll)
    return result(without_migration(through, NO_INFERENCE), through.seconds, held)


@lru_cache(maxsize=256)
def chosen_threshold(
    workload: Workload,
    plan: Plan,
    cost: CostModel,
    elastic: bool,
    calls: tuple[Call, ...],
    options: SimulationOptions,
    update: StreamedUpdate | None = None,
) -> tuple[Threshold, InferenceWork]:
    """Choose the threshold, survivors and size of micro-groups for this workload and an `update` that is streamed, on
    draws of its own."""
    rng = np.random.default_rng(20240913)
    generate_plan = plan.call("actor_generate")
    replicas = plan.replicas or replica_count(generate_plan.layout)
    timing = replica_timing(workload, generate_plan, cost, options)
    drawn = [draw(workload, rng, options.predictability) for _ in range(THRESHOLD_BATCHES)]
    dealt, groups = [_dealt(lengths, replicas, elastic) for lengths in drawn], [lengths.group for lengths in drawn]
    begun = [RolloutState.begin(requests, timing, queues) for requests, queues in dealt]
    moving = migration_cost(workload, plan, cost, options)
    most = max(options.micro_group, workload.sequences // replicas)
    found = []
    for power in range((most // options.micro_group).bit_length()):
        inference = freed_inference(workload, calls, plan, cost, options, options.micro_group << power)
        found.append((search(ThresholdScan(begun, inference, moving, update, groups)), inference))
    return min(found, key=lambda pair: pair[0].seconds)


@lru_cache(maxsize=256)
def chosen_assignment(
    workload: Workload, timing: ReplicaTiming, most: int, options: SimulationOptions
) -> ReplicaAssignment:
    """Choose how many of `most` replicas to run for this workload, and the replica of each request, on a draw of its
    own."""
    lengths = draw(workload, np.random.default_rng(20260227), options.predictability)
    return best_assignment(lengths, timing, most, options)


def _dealt(lengths: DrawnLengths, replicas: int, by_prompt: bool) -> tuple[Requests, list[Ints]]:
    """Return the requests and their queues: one by one as verl deals them, or the samples of a prompt together."""
    queues = (
        [np.flatnonzero(lengths.group % replicas == r) for r in range(replicas)]
        if by_prompt
        else round_robin(len(lengths.group), replicas)
    )
    return Requests.of(lengths.prompt, lengths.response, shared_prefixes(lengths.prompt, lengths.group, queues)), queues


def _seen(end: float, poll: float) -> float:
    """Return the time at which a driver that looks every `poll` seconds sees the end."""
    return math.ceil(end / poll - 1e-9) * poll if poll else end


def _ends(fused: FusionResult, until: float) -> Floats:
    """Return the time at which each replica gives its devices back: freed replicas when inference ends, survivors when
    they have nothing more to do."""
    ends = np.full(fused.rollout.replicas, until)
    ends[fused.survivors] = fused.rollout.clocks[fused.survivors]
    return ends
