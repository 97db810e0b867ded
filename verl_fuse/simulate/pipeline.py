"""Trains actor and critic in one fused pipeline instead of one after the other (RLHFuse, section 5).

Invariants (tests/unit/simulate/test_pipeline.py):
- fused training is never slower than serial training in the layouts of the plan, and never faster than its work
  on the busiest rank;
- where no two layouts share ranks, the reason is given, and the plan stays as it is.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.memory import held_activations
from verl_fuse.cost.model import Batch
from verl_fuse.schedule.methods import solve
from verl_fuse.schedule.solution import Budget
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import mean_batch
from verl_fuse.simulate.stock import as_inference, compute_options
from verl_fuse.spec.model import Model
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.workload import Call, Workload

SOLVE_SECONDS = 20.0
"""Budget of a schedule search; methods without search need none of it."""
SOLVED_PAIRS = 3
"""Pairs of layouts whose schedule is solved, those with the least bound first."""


@dataclass(frozen=True)
class FusedTraining:
    """`plan` with the train layouts to use; `ratio`: fused over serial seconds of the passes, optimizer steps left out.
    `seconds`: all of training for a batch of mean lengths. `reason` tells why nothing is fused."""

    plan: Plan
    ratio: float
    seconds: float
    reason: str = ""
    problem: ScheduleProblem | None = None


@lru_cache(maxsize=256)
def fused_training(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> FusedTraining:
    """Return the fastest fused schedule over pairs of train layouts, or the plan as it is.

    One mini-batch of mean lengths is solved; its ratio holds for all, because lengths scale both schedules alike.
    """
    calls = {call.role: call for call in workload.calls if call.kind == "train"}
    if "critic" not in calls:
        return FusedTraining(plan, 1.0, 0.0, f"{workload.algorithm} trains no critic")
    now = tuple(plan.call(calls[role].name) for role in ("actor", "critic"))
    if now[0].mesh != now[1].mesh or now[0].mesh.size != cost.cluster.devices:
        return FusedTraining(plan, 1.0, 0.0, "actor and critic do not both train on all devices")
    choices = {role: compute_options(workload, call, cost, options) for role, call in calls.items()}
    known = {pair[0]: pair[1] for found in choices.values() for pair in found}
    serial = sum(known.get(call, float("inf")) for call in now)
    pairs = [
        (_bound(workload, actor, critic, cost, options), serial_seconds, actor, critic)
        for actor, actor_seconds in choices["actor"]
        for critic, critic_seconds in choices["critic"]
        if not unfusable(actor, critic)
        for serial_seconds in [actor_seconds + critic_seconds]
    ]
    best = FusedTraining(plan, 1.0, serial, "no two train layouts share pipeline ranks")
    for bound, both, actor, critic in sorted(pairs, key=lambda pair: pair[:2])[:SOLVED_PAIRS]:
        if bound >= best.seconds:
            break
        problem = fused_problem(workload, actor, critic, cost, options)
        room = activation_room(workload, actor, critic, cost, options)
        if room < problem.least_memory_limit:
            continue
        # One model after the other: each has its own room, which its layout was chosen for.
        alone = solve(problem, "serial", Budget(SOLVE_SECONDS)).makespan
        problem = replace(problem, memory_limit=room)
        ratio = min(1.0, solve(problem, options.schedule, Budget(SOLVE_SECONDS)).makespan / alone)
        fixed = _updates(workload, (actor, critic), cost)
        seconds = fixed + ratio * (both - fixed)
        if seconds < best.seconds:
            best = FusedTraining(_with(workload, plan, (actor, critic), calls), ratio, seconds, "", problem)
        elif best.ratio == 1.0:
            best = replace(best, reason="no fused schedule is faster than the serial one in its best layouts")
    return best


def unfusable(actor: CallPlan, critic: CallPlan) -> str:
    """Return the reason why two train calls cannot share a pipeline; empty if they can."""
    a, c = actor.layout, critic.layout
    if a.shards or c.shards:
        return f"actor {a} and critic {c}: FSDP has no pipeline"
    if (a.tp, a.cp) != (c.tp, c.cp):
        return f"actor {a} and critic {c} differ in tp or cp: a rank of one is no rank of the other"
    if max(a.pp, c.pp) == 1:
        return "no pipeline parallelism, hence no bubbles to fill"
    if max(a.pp, c.pp) % min(a.pp, c.pp):
        return f"pp={a.pp} and pp={c.pp}: one must divide the other"
    return ""


def fused_problem(
    workload: Workload, actor: CallPlan, critic: CallPlan, cost: AnalyticCost, options: SimulationOptions
) -> ScheduleProblem:
    """Describe one mini-batch on one group of ranks: the deeper model once, the other model in copies that run against
    its direction. Times in seconds."""
    deep, flat = sorted((actor, critic), key=lambda call: -call.layout.pp)
    stages, pipelines = deep.layout.pp, []
    for call in (deep, flat):
        model, part = _micro_batch(workload, call)
        depth = call.layout.pp
        forward, backward = _stages(workload, call, cost, options)
        held = held_activations(model, call.layout, part.tokens, options.recompute)
        for copy in range(stages // depth):
            ranks = range(copy * depth, (copy + 1) * depth)
            ordered = tuple(ranks if call is deep else reversed(ranks))
            name = "actor" if call is actor else "critic"
            pipelines.append(Pipeline(name, ordered, call.microbatches, forward, backward, held))
    return ScheduleProblem(stages, tuple(pipelines), time_unit="s", memory_unit="B")


def activation_room(
    workload: Workload, actor: CallPlan, critic: CallPlan, cost: AnalyticCost, options: SimulationOptions
) -> float:
    """Return the bytes that both models leave on a device for activations held from forward to backward; the other
    needs of a running micro-batch count once, whichever model runs."""
    static = working = 0.0
    for call in (actor, critic):
        model, part = _micro_batch(workload, call)
        memory = cost.memory(model, "train", call.layout, microbatch=part, recompute=options.recompute)
        static += memory.static
        held = min(held_activations(model, call.layout, part.tokens, options.recompute))
        working = max(working, memory.active - held)
    return cost.cluster.device.memory - static - working


def _micro_batch(workload: Workload, call: CallPlan) -> tuple[Model, Batch]:
    """Return the model of a train call, and one micro-batch of mean lengths."""
    model = workload.model("actor" if call.call == "actor_train" else "critic")
    return model, mean_batch(workload).split(call.layout.dp * workload.minibatches * call.microbatches)


def _stages(
    workload: Workload, call: CallPlan, cost: AnalyticCost, options: SimulationOptions
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds of each stage for one micro-batch."""
    model, part = _micro_batch(workload, call)
    return (
        cost.stage_seconds(model, call.layout, part),
        cost.stage_seconds(model, call.layout, part, backward=True, recompute=options.recompute),
    )


def _bound(
    workload: Workload, actor: CallPlan, critic: CallPlan, cost: AnalyticCost, options: SimulationOptions
) -> float:
    """Return the least time of a schedule of this pair: the busiest rank's work, and each model alone."""
    updates = workload.epochs * workload.minibatches
    both = [[f + b for f, b in zip(*_stages(workload, call, cost, options), strict=True)] for call in (actor, critic)]
    alone = [sum(s) + (c.microbatches - 1) * max(s) for s, c in zip(both, (actor, critic), strict=True)]
    busiest = sum(c.microbatches * sum(s) / len(s) for s, c in zip(both, (actor, critic), strict=True))
    return updates * max(*alone, busiest) + _updates(workload, (actor, critic), cost)


def _updates(workload: Workload, calls: tuple[CallPlan, CallPlan], cost: AnalyticCost) -> float:
    """Return the seconds of all gradient reductions and optimizer steps, which are not fused."""
    models = (workload.actor, workload.model("critic"))
    once = sum(cost.update(model, call.layout) for model, call in zip(models, calls, strict=True))
    return workload.epochs * workload.minibatches * once


def _with(workload: Workload, plan: Plan, trains: tuple[CallPlan, CallPlan], calls: dict[str, Call]) -> Plan:
    """Return the plan with these train placements, and inference of trained roles on the devices of their weights."""
    new = dict(zip((calls["actor"].name, calls["critic"].name), trains, strict=True))
    for call in workload.calls:
        old = plan.call(call.name)
        train = calls.get(call.role)
        if call.kind != "infer" or train is None:
            continue
        trained = plan.call(train.name)
        if (old.mesh, old.layout) == (trained.mesh, trained.layout):
            new[call.name] = as_inference(workload, call, new[train.name])
    return replace(plan, calls=tuple(new.get(call.call, call) for call in plan.calls))
