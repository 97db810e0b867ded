"""Simulates a whole training step under a strategy.

Invariants (tests/unit/simulate/test_step.py):
- generation of a step waits for the train calls of the step before, no call for less than its inputs;
- `pipeline` and `interstage` change nothing where they are predicted to gain nothing, up to the pace at which the
  driver looks;
- a step's seconds are at least the seconds of any of its tasks, and idle shares are between 0 and 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.drafter import FIGURES
from verl_fuse.cost.model import Batch
from verl_fuse.simulate.calls import call_batch, infer_seconds, is_dedicated, streaming_factor, train_seconds
from verl_fuse.simulate.copies import notes_of, update_of
from verl_fuse.simulate.decided import SimulatedPolicy
from verl_fuse.simulate.draw import DrawnLengths, draw
from verl_fuse.simulate.generation import GenerationResult, generate
from verl_fuse.simulate.options import STOCK_METRICS, SimulationOptions, features_of
from verl_fuse.simulate.pipeline import FusedTraining, fused_training
from verl_fuse.simulate.placement import CRITIC_TRAIN, deferred, is_apart, placements
from verl_fuse.simulate.shared_prompts import notes_of as notes_of_shared
from verl_fuse.simulate.shared_prompts import shared_batch, shares
from verl_fuse.simulate.streamed import StreamedTail
from verl_fuse.simulate.tail import inference_end
from verl_fuse.simulate.tasks import ScheduledTask, Task, run_tasks
from verl_fuse.simulate.trace import idle_share, timeline_of
from verl_fuse.spec.micro_batches import FORWARD
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.timeline import CALL_STAGES, FUSED_UPDATE, GENERATION, UPDATE_WEIGHTS, Timeline
from verl_fuse.spec.workload import Call, Workload
from verl_fuse.timeline.tracks import totals

UNROLLED = 3
"""Steps in a row where calls of two steps can overlap; the last one counts."""

PLACEMENT_DRAWS = 2
"""Rows of steps on which the critic's placement is chosen; it then holds for other ones, as at run time."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one step. `stages` are wall-clock seconds by verl's stage names; `device_seconds` are the paid
    seconds; `cost` is in the cluster's currency; `notes` tell the decisions of the features."""

    strategy: str
    seconds: float
    stages: Mapping[str, float]
    idle: float
    device_seconds: float
    cost: float
    generation: GenerationResult
    placed: tuple[ScheduledTask, ...]
    plan: Plan
    lengths: DrawnLengths
    notes: tuple[str, ...] = ()

    @property
    def generation_and_inference(self) -> float:
        """Return the seconds from the start of generation to the last input of training."""
        before = [p for p in self.placed if p.task.category in ("generate", "inference", "reward")]
        return max(p.end for p in before) - min(p.start for p in before)

    @property
    def training(self) -> float:
        """Return the seconds from the first train call's start to the last one's end."""
        train = [p for p in self.placed if p.task.category == "train"]
        return max(p.end for p in train) - min(p.start for p in train)

    @cached_property
    def spans(self) -> Timeline:
        """Return the spans of the step, like the spans of a recorded step."""
        return timeline_of(self.strategy, self.placed, self.generation, self.plan, self.lengths)


def simulate_step(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    strategy: str,
    rng: np.random.Generator,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
    policy: SimulatedPolicy | None = None,
) -> StepResult:
    """Simulate one step of `workload` placed by `plan`; `realloc` adds nothing to a plan that already has several
    layouts. A `policy` decides on the rollout instead of the strategy's features."""
    features = features_of(strategy)
    if "old_log_prob" in features and workload.minibatches == 1:
        workload = replace(workload, old_log_prob=False)
    if "values" in features and workload.minibatches == 1:
        workload = replace(workload, values=False)
    if "placement" in features:
        plan = chosen_placement(workload, plan, cost, strategy, options)
    return _simulated(workload, plan, cost, strategy, rng, options, policy)


@lru_cache(maxsize=64)
def chosen_placement(
    workload: Workload, plan: Plan, cost: AnalyticCost, strategy: str, options: SimulationOptions
) -> Plan:
    """Return the plan itself, or the placement of its critic that is fastest on draws of its own."""

    def seconds(plan: Plan) -> float:
        rng = np.random.default_rng(20261124)
        return sum(_simulated(workload, plan, cost, strategy, rng, options).seconds for _ in range(PLACEMENT_DRAWS))

    return min((plan, *placements(workload, plan, cost, options)), key=seconds)


def _simulated(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    strategy: str,
    rng: np.random.Generator,
    options: SimulationOptions,
    policy: SimulatedPolicy | None = None,
) -> StepResult:
    features = features_of(strategy)
    fused = fused_training(workload, plan, cost, options) if "pipeline" in features else None
    plan = fused.plan if fused else plan
    apart = len({plan.call(call.name).mesh for call in workload.calls}) > 1
    defers = "placement" in features and is_apart(plan)
    steps: list[list[Task]] = []
    for _ in range(UNROLLED if apart and not defers else 1):
        lengths = draw(workload, rng, options.predictability)
        tasks, generation = step_tasks(workload, plan, cost, features, lengths, options, fused, policy)
        steps.append(tasks)
    if defers:
        # On the lengths that the other strategies get, over and over.
        steps = [deferred(tasks)] * UNROLLED
    placed = run_tasks(steps, plan.devices)
    last = tuple(p for p in placed if p.step == len(steps) - 1)
    ends = [_end(placed, step, defers) for step in (len(steps) - 1, len(steps) - 2)]
    begin = min(p.start for p in last)
    devices, seconds = plan.devices, ends[0] - ends[1]
    last = tuple(replace(p, start=p.start - begin, end=p.end - begin) for p in last)
    paid = devices * seconds - _given_back(plan, generation)
    return StepResult(
        strategy=strategy,
        seconds=seconds,
        stages=totals((p.task.stage, p.task.seconds) for p in last),
        idle=idle_share(last, generation, plan),
        device_seconds=paid,
        cost=paid / 3600 * cost.cluster.price_per_device_hour,
        generation=generation,
        placed=last,
        plan=plan,
        lengths=lengths,
        notes=(
            *_notes(features, generation, fused, lengths),
            *([FIGURES] if "speculation" in features and not cost.cluster.device.is_cpu else []),
            *_left_out(features, workload),
            *notes_of_shared(workload, plan, features),
            *notes_of(workload, plan, cost, features, options, generation.streamed),
            *_placing(features, plan),
        ),
    )


def _end(placed: Sequence[ScheduledTask], step: int, defers: bool) -> float:
    """Return the end of a step: the end of its last task, or, where the critic is trained beside the next step, of its
    weight sync; 0 for the step before the first."""
    ends = (p.end for p in placed if p.step == step and not (defers and p.task.category == "train"))
    return max(ends, default=0.0)


def _placing(features: frozenset[str], plan: Plan) -> Iterator[str]:
    if "placement" not in features:
        return
    if not is_apart(plan):
        yield "a critic on devices of its own is not predicted to gain"
        return
    mesh = plan.call(CRITIC_TRAIN).mesh
    yield (
        f"critic on the last {mesh.size} of {plan.devices} devices: "
        f"fuse.placement.critic={{first:{mesh.first},devices:{mesh.size}}} fuse.placement.defer=true"
    )


def _notes(
    features: frozenset[str], generation: GenerationResult, fused: FusedTraining | None, lengths: DrawnLengths
) -> tuple[str, ...]:
    notes = []
    if "interstage" in features:
        note = "no tail is moved: no migration is predicted to gain"
        if generation.moves:
            kept = f"{len(generation.fused.survivors)} of {generation.replicas} replicas kept"
            note = f"tail of {np.isnan(generation.moves[0].paused.finish).mean():.0%} moved, {kept}"
        notes.append(note)
    if "scaling" in features and "interstage" not in features:
        notes.append(f"{generation.fused.rollout.replicas} of {generation.replicas} replicas used")
    if generation.slices is not None:
        freed = generation.replicas - len(generation.fused.survivors)
        notes.append(
            f"{freed} of {generation.replicas} replicas freed, {generation.fused.moved} requests moved, "
            f"{len(generation.slices)} micro-groups inferred meanwhile"
        )
    if fused is not None:
        notes.append(fused.reason or f"fused passes take {fused.ratio:.0%} of serial ones")
    return tuple(notes)


def _left_out(features: frozenset[str], workload: Workload) -> Iterator[str]:
    if "zero_gradient" in features:
        but = ", and a forward pass for their metrics" if STOCK_METRICS in features else ""
        yield f"{workload.zero_gradient:.0%} of the samples have no gradient{but}"
    if "old_log_prob" in features and workload.old_log_prob:
        of = ", of samples with a gradient" if workload.zero_gradient and STOCK_METRICS not in features else ""
        yield f"old log-probs of {workload.minibatches - 1} of {workload.minibatches} mini-batches are needed{of}"
    if "values" in features and workload.critic is None:
        yield "no critic is trained"
    elif "values" in features and workload.values:
        yield f"values of {workload.minibatches - 1} of {workload.minibatches} mini-batches are needed"


def step_tasks(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    features: frozenset[str],
    lengths: DrawnLengths,
    options: SimulationOptions,
    fused: FusedTraining | None = None,
    policy: SimulatedPolicy | None = None,
) -> tuple[list[Task], GenerationResult]:
    """Return the tasks of one step with the lengths drawn for it."""
    # With metrics of what is computed, samples without a gradient need no old log-probs, whatever the loss trains.
    passed = 1.0 if STOCK_METRICS in features else 1 - workload.zero_gradient
    skipped = workload.zero_gradient * (1 - FORWARD if STOCK_METRICS in features else 1.0)
    workload = replace(workload, zero_gradient=skipped if "zero_gradient" in features else 0.0)
    tokens = lengths.prompt + lengths.response
    batches = {
        c.name: shared_batch(lengths, workload.minibatches if c.kind == "train" else 1)
        if shares(c, plan, features)
        else call_batch(workload, c, plan.call(c.name), tokens, options)
        for c in workload.calls[1:]
    }
    for c in workload.calls[1:]:
        # The head of a value model makes one number a token.
        if "response_logits" in features and c.role in ("actor", "reference") and plan.call(c.name).layout.shards:
            batches[c.name] = replace(batches[c.name], logits=float(lengths.response.sum()))
    rollout_mesh = plan.call("actor_generate").mesh
    infer = [call for call in workload.calls if call.kind == "infer"]
    # What the first mini-batch leaves of a pass is not streamed.
    passes = {"old_log_prob": "actor_infer", "values": "critic_infer"}
    short = {passes[name] for name in passes.keys() & features}
    early = [call for call in infer if call.name not in short]
    shared = tuple(call for call in early if plan.call(call.name).mesh.overlaps(rollout_mesh))
    takes_over = "interstage" in features or policy is not None
    takeover = shared if takes_over and is_dedicated(cost, options) else ()
    update = update_of(workload, plan, cost, features, options)
    generation = generate(workload, plan, cost, features, lengths, takeover, options, update, policy)
    seconds = {
        call.name: infer_seconds(workload, call, plan.call(call.name), cost, batches[call.name]) for call in infer
    }
    for name in short & seconds.keys():
        seconds[name] *= (passed if name == "actor_infer" else 1.0) * (1 - 1 / workload.minibatches)
    left = dict(seconds)
    if generation.inference_end is not None:
        _scale(left, takeover, generation.inference_end - generation.end)
    finish = np.sort(generation.fused.rollout.finish)
    if "streaming" in features and shared:
        # Inference beside generation only uses the free headroom: work beyond the headroom slows generation by as much.
        total = sum(seconds[call.name] for call in shared) * streaming_factor(workload, shared, plan, cost, options)
        end = inference_end(
            finish, np.full(len(finish), total / len(finish)), 0.0, generation.end, 0.0,
            options.headroom * is_dedicated(cost, options), 1.0,
        )  # fmt: skip
        _scale(left, shared, end - generation.end)
    if features & {"interstage", "streaming"}:
        # A critic with workers of its own computes its values in one call, behind its update.
        apart = [c for c in early if c not in shared and not ("placement" in features and c.role == "critic")]
        for mesh in {plan.call(call.name).mesh for call in apart}:
            streamed = tuple(call for call in apart if plan.call(call.name).mesh == mesh)
            total = sum(seconds[call.name] for call in streamed)
            work = np.full(len(finish), total / len(finish))
            end = inference_end(finish, work, 0.0, generation.end, 1.0, 1.0, 1.0)
            _scale(left, streamed, end - generation.end)
    trains = tuple(call.name for call in workload.calls if call.kind == "train")
    merged = fused is not None and fused.ratio < 1
    trained = {name: "train" if merged else name for name in trains}
    before = (*dict.fromkeys(trained.values()), UPDATE_WEIGHTS)
    tasks = [Task("actor_generate", GENERATION, "generate", (rollout_mesh,), generation.end, after_previous=before)]
    for call in infer:
        call_plan = plan.call(call.name)
        move = _move(workload, call, plan, cost, trained)
        tasks += [move] if move else []
        after = (*call.after, *([move.name] if move else []))
        category = "reward" if call.role == "reward" else "inference"
        tasks.append(Task(call.name, CALL_STAGES[call.name], category, (call_plan.mesh,), left[call.name], after))
    if generation.streamed is None:
        tasks += _train_tasks(workload, plan, cost, batches, options, fused.ratio if merged and fused else None)
    else:
        tasks.append(_streamed_task(workload, plan, generation, generation.streamed))
    tasks.append(_sync_task(workload, plan, cost, trained["actor_train"]))
    return tasks, generation


def _scale(seconds: dict[str, float], calls: tuple[Call, ...], total: float) -> None:
    """Share out `total` seconds over the calls, as they shared the time before."""
    before = sum(seconds[call.name] for call in calls)
    for call in calls:
        seconds[call.name] *= total / before


def _move(workload: Workload, call: Call, plan: Plan, cost: AnalyticCost, trained: Mapping[str, str]) -> Task | None:
    """Return the task that moves the weights that training has changed to the devices of a call; None if the weights
    are there."""
    train = f"{call.role}_train"
    if train not in trained:
        return None
    source, target = plan.call(train), plan.call(call.name)
    seconds = cost.transfer(workload.model(call.role), (source.mesh, source.layout), (target.mesh, target.layout))
    if not seconds:
        return None
    meshes = (source.mesh, target.mesh)
    return Task(f"{call.name} weights", "reallocate", "sync", meshes, seconds, after_previous=(trained[train],))


def _sync_task(workload: Workload, plan: Plan, cost: AnalyticCost, trained: str) -> Task:
    source, target = plan.call("actor_train"), plan.call("actor_generate")
    seconds = cost.sync(workload.actor, (source.mesh, source.layout), (target.mesh, target.layout))
    return Task(UPDATE_WEIGHTS, UPDATE_WEIGHTS, "sync", (source.mesh, target.mesh), seconds, (trained,))


def _streamed_task(workload: Workload, plan: Plan, generation: GenerationResult, tail: StreamedTail) -> Task:
    """Return the remainder of the update after generation: calls that run, then the rest."""
    late = max(0.0, tail.ended - generation.end) if generation.inference_end is None else 0.0
    (call,) = [call for call in workload.calls if call.kind == "train"]
    return Task(call.name, CALL_STAGES[call.name], "train", (plan.call(call.name).mesh,), late + tail.left, call.after)


def _train_tasks(
    workload: Workload,
    plan: Plan,
    cost: AnalyticCost,
    batches: Mapping[str, Batch],
    options: SimulationOptions,
    ratio: float | None,
) -> list[Task]:
    """Return one task per train call, or, with `ratio` fused over serial, one for both."""
    calls = [call for call in workload.calls if call.kind == "train"]
    seconds = {c.name: train_seconds(workload, c, plan.call(c.name), cost, batches[c.name], options) for c in calls}
    updates = workload.epochs * workload.minibatches
    # The optimizer steps as ever.
    steps = updates * cost.update(workload.actor, plan.call("actor_train").layout)
    seconds["actor_train"] -= workload.zero_gradient * (seconds["actor_train"] - steps)
    if ratio is None:
        return [
            Task(c.name, CALL_STAGES[c.name], "train", (plan.call(c.name).mesh,), seconds[c.name], c.after)
            for c in calls
        ]
    fixed = sum(updates * cost.update(workload.model(c.role), plan.call(c.name).layout) for c in calls)
    total = fixed + ratio * (sum(seconds.values()) - fixed)
    return [Task("train", FUSED_UPDATE, "train", (plan.call(calls[0].name).mesh,), total, calls[0].after)]


def _given_back(plan: Plan, generation: GenerationResult) -> float:
    """Return the device-seconds of generation that were not paid for."""
    call = plan.call("actor_generate")
    per_replica = call.mesh.size / generation.replicas
    until = generation.inference_end or generation.end
    return max(0.0, generation.replicas * until - generation.held) * per_replica
