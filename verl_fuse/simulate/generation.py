"""Simulates the generation of one step under a set of features, and the inference that goes with it.

Invariants (tests/unit/simulate/test_generation.py):
- without features the samples run as verl deals them out, and nothing is inferred before generation ends;
- `inference` is absent unless inference was taken into the stage; `held` never exceeds replicas times the stage's
  seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.simulate.calls import freed_inference, migration_cost
from verl_fuse.simulate.decided import (
    Move,
    Setting,
    SimulatedPolicy,
    SimulatedRun,
    SliceCall,
    decided,
    prompts_of,
    replica_views,
    seen_at,
    uid_of,
)
from verl_fuse.simulate.draw import DrawnLengths, draw
from verl_fuse.simulate.elastic import ReplicaAssignment, begin, best_assignment, run_elastic
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import devices_each, replica_timing, replicas_of
from verl_fuse.simulate.rollout import round_robin
from verl_fuse.simulate.streamed import NO_INFERENCE, StreamedTail, StreamedUpdate, streamed_tail
from verl_fuse.simulate.tail import FusionResult, InferenceWork, migrated, trigger_time
from verl_fuse.simulate.tail import unmigrated as without_migration
from verl_fuse.simulate.threshold import Threshold, ThresholdScan, search
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.step import STAGES, Stage
from verl_fuse.spec.timeline import CALL_STAGES
from verl_fuse.spec.workload import Call, Workload

THRESHOLD_BATCHES = 2
"""Batches on which the threshold is chosen; it then holds for other batches, as at run time."""


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """`fused` is the rollout; `end` when the driver sees generation ended; `inference_end` set when the stage did the
    inference too.

    `replicas` there are; `held`: replica-seconds of their devices until given back;
    `moves`: the rollout whenever requests moved; `slices`: the calls of freed replicas, where a policy decides on them;
    `streamed`: the update, where it is trained in copies.
    """

    fused: FusionResult
    moves: tuple[Move, ...]
    end: float
    inference_end: float | None
    replicas: int
    held: float
    streamed: StreamedTail | None = None
    slices: tuple[SliceCall, ...] | None = None


def generate(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    features: frozenset[str],
    lengths: DrawnLengths,
    calls: tuple[Call, ...],
    options: SimulationOptions,
    update: StreamedUpdate | None = None,
    policy: SimulatedPolicy | None = None,
) -> GenerationResult:
    """Run the rollout. `calls`: inference calls that freed replicas may take over; they are left alone without
    `interstage`. `update`: training in copies, streamed as far as replicas are released before the end. `policy`
    decides instead of the features."""
    if policy is not None:
        return _decided(workload, plan, cost, lengths, calls, replace(options, acceptance=None), policy)
    if "speculation" not in features:
        options = replace(options, acceptance=None)
    timing, replicas = replica_timing(workload, plan.call("actor_generate"), cost, options), replicas_of(plan)
    poll = options.fuse_poll if features else options.stock_poll
    elastic = "scaling" in features

    def result(fused: FusionResult, end: float, held: float) -> GenerationResult:
        tail = None if update is None else streamed_tail(fused, lengths.group, update, replicas=replicas)
        return GenerationResult(fused, (), seen_at(end, poll), None, replicas, held, tail)

    if "interstage" in features and replicas > 1:
        chosen, inference = chosen_threshold(workload, plan, cost, elastic, calls, options, update)
        begun = begin(lengths, timing, _dealt(lengths, replicas, elastic))
        through = begun.advance()
        if chosen.threshold:
            time = trigger_time(through, chosen.threshold)
            paused = begun.advance(time)
            fused = migrated(paused, time, chosen.survivors, inference, migration_cost(workload, plan, cost, options))
            end, tail = seen_at(fused.generation_end, poll), None
            inferred = max(fused.seconds, end) if calls else None
            if update is not None:
                tail = streamed_tail(fused, lengths.group, update, inference)
                inferred = max(tail.ended + tail.inference_left, end) if calls else None
            until = inferred or end
            held = float(_ends(fused, until).sum()) if elastic else replicas * until
            moves = (Move(time, paused, tuple(fused.survivors.tolist())),)
            return GenerationResult(fused, moves, end, inferred, replicas, held, tail)
    elif elastic:
        run = run_elastic(lengths, timing, chosen_assignment(workload, timing, replicas, options), options)
        fused = without_migration(run.rollout, NO_INFERENCE)
        return result(fused, run.seconds, float(run.ends.sum()))
    else:
        through = begin(lengths, timing, _dealt(lengths, replicas, elastic)).advance()
    held = float(through.clocks.sum()) if elastic else replicas * seen_at(through.seconds, poll)
    return result(without_migration(through, NO_INFERENCE), through.seconds, held)


@lru_cache(maxsize=256)
def chosen_threshold(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    elastic: bool,
    calls: tuple[Call, ...],
    options: SimulationOptions,
    update: StreamedUpdate | None = None,
) -> tuple[Threshold, InferenceWork]:
    """Choose the threshold, survivors and size of micro-groups for this workload and an `update` that is streamed, on
    draws of its own."""
    rng = np.random.default_rng(20240913)
    timing, replicas = replica_timing(workload, plan.call("actor_generate"), cost, options), replicas_of(plan)
    drawn = [draw(workload, rng, options.predictability) for _ in range(THRESHOLD_BATCHES)]
    begun = [begin(lengths, timing, _dealt(lengths, replicas, elastic)) for lengths in drawn]
    groups = [lengths.group for lengths in drawn]
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


def _decided(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    lengths: DrawnLengths,
    calls: tuple[Call, ...],
    options: SimulationOptions,
    policy: SimulatedPolicy,
) -> GenerationResult:
    """Run the rollout with a policy that assigns prompts, frees replicas and chooses their inference."""
    timing, replicas = replica_timing(workload, plan.call("actor_generate"), cost, options), replicas_of(plan)
    # The stages that a lane of slices computes are those of the trainer; a reward model's scores are beside them.
    stages: tuple[Stage, ...] = tuple(
        stage for stage in STAGES if any(CALL_STAGES[call.name] == stage for call in calls)
    )
    dealt = round_robin(len(lengths.group), replicas)
    views = replica_views(begin(lengths, timing, dealt))

    def run() -> SimulatedRun:
        chosen, _ = chosen_threshold(workload, plan, cost, False, calls, options)
        return SimulatedRun(views, devices_each(plan), stages, chosen.threshold if replicas > 1 else 0)

    asked, prompts = policy.begin_step(run), prompts_of(lengths.group)
    if predictions := asked.predict(prompts):
        prompts = [replace(one, prediction=found) for one, found in zip(prompts, predictions, strict=True)]
    homes = asked.assign(prompts, views, {})
    begun = begin(lengths, timing, dealt if homes is None else _queues(lengths.group, homes, replicas))
    inference = freed_inference(workload, calls, plan, cost, options, options.micro_group)
    moving = migration_cost(workload, plan, cost, options)

    def slice_factor(samples: int) -> float:
        return freed_inference(workload, calls, plan, cost, options, samples).slice_factor

    setting = Setting(inference, moving, stages, options.fuse_poll, policy.steps, slice_factor)
    found = decided(begun, lengths.group, asked, setting, homes, policy.tell)
    inferred = found.inferred if found.calls else None
    held = replicas * (inferred or found.seen)
    return GenerationResult(found.fused, found.moves, found.seen, inferred, replicas, held, None, found.calls)


def _queues(group: Ints, homes: Mapping[str, int], replicas: int) -> list[Ints]:
    """Return the requests of each replica: where their prompts were assigned to, the others where the fewest are."""
    queues: list[list[int]] = [[] for _ in range(replicas)]
    for row, number in enumerate(group.tolist()):
        fewest = min(range(replicas), key=lambda rank: len(queues[rank]))
        queues[homes.get(uid_of(number), fewest)].append(row)
    return [np.array(queue, np.int64) for queue in queues]


def _dealt(lengths: DrawnLengths, replicas: int, by_prompt: bool) -> list[Ints]:
    """Return the requests of each replica: one by one as verl deals them, or the samples of a prompt together."""
    if by_prompt:
        return [np.flatnonzero(lengths.group % replicas == r) for r in range(replicas)]
    return round_robin(len(lengths.group), replicas)


def _ends(fused: FusionResult, until: float) -> Floats:
    """Return the time at which each replica gives its devices back: freed replicas when inference ends, survivors when
    they have nothing more to do."""
    ends = np.full(fused.rollout.replicas, until)
    ends[fused.survivors] = fused.rollout.clocks[fused.survivors]
    return ends
