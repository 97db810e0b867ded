"""Reads the floors of the software off recorded runs: the seconds that their stages took beyond the seconds of the
model's parts by the profile.

Invariants (tests/unit/cost/test_floors.py):
- runs whose stages were made from known floors give the same floors back;
- no floor is negative.
Relative errors count alike, so that short and long steps do. Runs in which passes have several micro-batches, within a
factor of two as many, hardly tell the seconds of a call from those of a micro-batch, and those of an update from those
of a backward pass: what is assumed of each (calibration.py) then tells them apart.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import CPU_FLOORS, GRAPHS, EngineFloors
from verl_fuse.cost.model import Batch
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, RecordedStep
from verl_fuse.errors import FuseError
from verl_fuse.spec.arrays import Ints, nonnegative_fit
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.timeline import GENERATION, INFERENCE_STAGES, TRAIN_STAGES, UPDATE_CRITIC, UPDATE_WEIGHTS, VALUES

NO_FLOORS = EngineFloors("recorded", block=0.0, decode_block=0.0, collective=0.0, decode_step=0.0, call=0.0)


def fit_floors(runs: Sequence[RecordedRun], actor: Model, cost: ProfiledCost) -> EngineFloors:
    """Return the floors of generation, inference, training and weight sync. The critic, where there is one, is of the
    actor's size."""
    bare = dataclasses.replace(cost, engine=NO_FLOORS)
    steps = [(run, step) for run in runs for step in run.steps]
    generating = [(run, step) for run, step in steps if GENERATION in step.stages]
    if not generating:
        raise FuseError(
            "samples moved between replicas in every recorded step, so that the seconds of a decode step cannot be "
            "read; add a run in observe mode, or with fuse.interstage.migration_threshold=null and "
            "fuse.elastic.enabled=false"
        )
    request, decode_step = _fit(
        [_generation_row(run, step) for run, step in generating],
        [step.stages[GENERATION] for _, step in generating],
        [generation_seconds(step, actor, bare, run.tp, run.most) for run, step in generating],
    )
    call = row = backward = 0.0
    assumed = CPU_FLOORS if cost.cluster.device.is_cpu else GRAPHS
    inferring = [(run, step, stage) for run, step in steps for stage in INFERENCE_STAGES if stage in step.stages]
    training = [(run, step, stage) for run, step in steps for stage in TRAIN_STAGES if stage in step.stages]
    if inferring:
        counts = [run.microbatches(stage, step) for run, step, stage in inferring]
        taken = [step.stages[stage] for _, step, stage in inferring]
        explained = [stage_seconds(run, step, stage, actor, bare) for run, step, stage in inferring]
        # How much of a call is that of its sequences is assumed always: more of them have more micro-batches too.
        sequences = [run.batch(stage, step).sequences for run, step, stage in inferring]
        wholes = [assumed.call + assumed.row * count for count in sequences]
        if _alike(counts):
            factor, microbatch = _apart(1, counts, taken, explained, wholes, assumed.microbatch)
        elif max(counts) > 1:
            factor, microbatch = _fit(list(zip(wholes, counts, strict=True)), taken, explained)
        else:
            (factor,), microbatch = _fit([(whole,) for whole in wholes], taken, explained), 0.0
        call, row = factor * assumed.call, factor * assumed.row
        inference = {"call": call, "row": row, "microbatch": microbatch}
        known = dataclasses.replace(cost, engine=dataclasses.replace(NO_FLOORS, **inference))
        counts = [run.microbatches(stage, step) for run, step, stage in training]
        updates = [run.minibatches for run, _, _ in training]
        taken = [step.stages[stage] for _, step, stage in training]
        explained = [stage_seconds(run, step, stage, actor, known) for run, step, stage in training]
        if _alike(counts) and len(set(updates)) == 1:
            # Of an accelerator's as much is assumed as of a call.
            of_update = assumed.update or assumed.call
            wholes = [of_update] * len(training)
            factor, backward = _apart(updates[0], counts, taken, explained, wholes, assumed.backward)
            update = factor * of_update
        elif max(counts, default=0) > 1:
            rows = [(each, each * count) for each, count in zip(updates, counts, strict=True)]
            update, backward = _fit(rows, taken, explained)
        else:
            (update,) = _fit([(each,) for each in updates], taken, explained)
    else:
        # Without a call for inference the seconds of a call are counted with those of an update, and those of its
        # sequences with their micro-batches.
        update, microbatch = _fit(
            [(run.minibatches, run.minibatches * run.microbatches(stage, step)) for run, step, stage in training],
            [step.stages[stage] for _, step, stage in training],
            [stage_seconds(run, step, stage, actor, bare) for run, step, stage in training],
        )
    syncing = [step.stages[UPDATE_WEIGHTS] for _, step in steps if UPDATE_WEIGHTS in step.stages]
    (sync,) = _fit([(1.0,)] * len(syncing), syncing, [0.0] * len(syncing)) if syncing else (0.0,)
    floors = {"request": request, "decode_step": decode_step, "call": call, "row": row, "microbatch": microbatch}
    return dataclasses.replace(NO_FLOORS, **floors, backward=backward, update=update, sync=sync)


def _alike(counts: Sequence[int]) -> bool:
    """Tell whether calls have several micro-batches, within a factor of two as many, so that noise decides what these
    take and what a call takes."""
    return min(counts, default=0) > 1 and max(counts) <= 2 * min(counts)


def _apart(
    times: int,
    counts: Sequence[int],
    seconds: Sequence[float],
    explained: Sequence[float],
    wholes: Sequence[float],
    part: float,
) -> tuple[float, float]:
    """Return how many times the seconds assumed of what is done so many `times` (`wholes`) there are in these, and the
    seconds of each of its parts, by their `counts`: as many times what is assumed of one (`part`); where no seconds are
    assumed of a part, the whole is what is assumed, where there is as much to explain, and parts are the rest."""
    if part:
        rows = [(times * (whole + count * part),) for whole, count in zip(wholes, counts, strict=True)]
        (factor,) = _fit(rows, seconds, explained)
        return factor, factor * part
    shares = ((all_ - model) / whole for all_, model, whole in zip(seconds, explained, wholes, strict=True))
    factor = min(1.0, max(min(shares) / times, 0.0))
    known = [times * factor * whole + model for whole, model in zip(wholes, explained, strict=True)]
    (each,) = _fit([(times * count,) for count in counts], seconds, known)
    return factor, each


@dataclass(frozen=True)
class StageError:
    """Seconds of a stage, medians over a run's steps, so that no step that was disturbed decides: measured, predicted,
    and the floors' part of the prediction."""

    stage: str
    measured: float
    predicted: float
    floors: float


def stage_errors(run: RecordedRun, actor: Model, cost: ProfiledCost) -> list[StageError]:
    """Return what `cost` predicts for each stage of a recorded run, beside what was measured."""
    bare = dataclasses.replace(cost, engine=NO_FLOORS)

    def seconds(stage: str, step: RecordedStep, by: ProfiledCost) -> float:
        if stage == GENERATION:
            return generation_seconds(step, actor, by, run.tp, run.most)
        if stage == UPDATE_WEIGHTS:
            return by.engine.sync
        return stage_seconds(run, step, stage, actor, by)

    found = []
    for stage in (GENERATION, *INFERENCE_STAGES, *TRAIN_STAGES, UPDATE_WEIGHTS):
        steps = [step for step in run.steps if stage in step.stages]
        if steps:
            measured = median(step.stages[stage] for step in steps)
            predicted, alone = (median(seconds(stage, step, by) for step in steps) for by in (cost, bare))
            found.append(StageError(stage, measured, predicted, predicted - alone))
    return found


def stage_seconds(run: RecordedRun, step: RecordedStep, stage: str, actor: Model, cost: ProfiledCost) -> float:
    """Return the seconds by `cost` of an inference or training stage of a recorded step."""
    model = actor.as_value_model() if stage in (VALUES, UPDATE_CRITIC) else actor
    layout, count, batch = Layout(dp=run.ranks), run.microbatches(stage, step), run.batch(stage, step)
    if stage in INFERENCE_STAGES:
        return cost.infer(model, layout, batch, count)
    return cost.train(model, layout, batch, run.minibatches, count, recompute=run.recompute)


def generation_seconds(step: RecordedStep, actor: Model, cost: AnalyticCost, tp: int, most: int | None) -> float:
    """Return the seconds by `cost` of the slowest replica of a recorded step, if all its requests come at once and
    `most` run at a time (None: all)."""
    layout, seconds = Layout(tp=tp), 0.0
    for here in _by_replica(step):
        prompts, passes = np.array(step.prompts)[here], step.passes[here]
        starts = _starts(passes, most)
        sequences = _running(starts, passes, np.ones(len(passes)))
        ticks = np.arange(1, len(sequences) + 1)
        # A request that runs since its start has so many tokens more.
        before = _running(starts, passes, prompts - step.tokens_per_pass * starts)
        context = before + step.tokens_per_pass * ticks * sequences
        if step.drafted:
            decoding = cost.verify(actor, layout, sequences, step.drafted, context)
        else:
            decoding = cost.decode(actor, layout, sequences, context)
        seconds = max(seconds, cost.prefill(actor, layout, Batch.of(prompts)) + float(np.sum(decoding)))
    return seconds


def _by_replica(step: RecordedStep) -> list[np.ndarray]:
    """Return for each replica which requests are its own."""
    return [np.array(step.replicas) == replica for replica in sorted(set(step.replicas))]


def _starts(passes: Ints, most: int | None) -> Ints:
    """Return the pass in which each request begins, in their order, on an engine that runs `most` at once."""
    if most is None or most >= len(passes):
        return np.zeros_like(passes)
    free = [0] * most
    return np.array([heapq.heapreplace(free, free[0] + int(taken)) for taken in passes])


def _running(starts: Ints, passes: Ints, values: np.ndarray) -> np.ndarray:
    """Return for each pass after the first the sum of the values of the requests that decode in it."""
    ends = starts + passes
    changes = np.zeros(int(ends.max()) + 1)
    np.add.at(changes, starts + 1, values)
    np.add.at(changes, ends, -values)
    return np.cumsum(changes)[1:-1]


def _generation_row(run: RecordedRun, step: RecordedStep) -> tuple[float, float]:
    """Return the requests per replica, and the passes of the replica that makes most of them; the floors are one
    replica's."""
    replicas = [step.passes[here] for here in _by_replica(step)]
    last = max((_starts(passes, run.most) + passes).max() for passes in replicas)
    return len(step.responses) / len(replicas), float(last)


def _fit(rows: Sequence[tuple[float, ...]], seconds: Sequence[float], explained: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients >= 0 of the rows that, with the explained seconds, come closest to the seconds: least
    squares of relative errors."""
    if not rows:
        raise FuseError("the recorded runs hold none of the stages " + ", ".join((*INFERENCE_STAGES, *TRAIN_STAGES)))
    weights = 1 / np.array(seconds)
    left, right = np.array(rows) * weights[:, None], (np.array(seconds) - explained) * weights
    return tuple(nonnegative_fit(left, right).tolist())
