"""Finishes a plan: the result of the search, with everything a user or a trainer needs to carry it out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.call_configs import handing_over
from verl_fuse.plan.evaluate import EVALUATED_STEPS, schedule
from verl_fuse.plan.executable import LEAST_SEARCH_SECONDS, best_executable
from verl_fuse.plan.overrides import placement_overrides
from verl_fuse.plan.planner import best_plan, full_space, move_seconds
from verl_fuse.plan.search import SearchResult
from verl_fuse.simulate.generation import chosen_threshold
from verl_fuse.simulate.options import SimulationOptions, of_plan
from verl_fuse.spec.plan import STRATEGIES, Plan, Strategy
from verl_fuse.spec.workload import Workload

# The limit is four times the largest cluster tried; on more devices, listing the layouts alone takes minutes.
MOST_PLANNED_DEVICES = 4096


@dataclass(frozen=True)
class PlanRequest:
    """strategies: verl's engines to choose from, none for the plan that reallocation could reach. weight: 1 is time, 0
    is money. time_limit: seconds for everything."""

    strategies: tuple[Strategy, ...] = STRATEGIES
    features: tuple[str, ...] = ()
    weight: float = 1.0
    time_limit: float = 10.0


@dataclass(frozen=True)
class PlanResult:
    """A plan, the search behind it, the devices and money it takes, and what was not looked at."""

    plan: Plan
    search: SearchResult
    nodes: int
    cost_per_step: float
    unsearched: tuple[str, ...] = ()


def make_plan(
    workload: Workload, cost: AnalyticCost, request: PlanRequest, report: Callable[[str], None] = lambda text: None
) -> PlanResult:
    """Return the best plan on the cluster, or on as many of its nodes as the weight of time against money asks for.

    Ctrl-C, once there is a plan, ends the search with the best one so far. `report` is told the search under way.
    """
    request = checked(workload, cost, request)
    smaller = [2**i for i in range(cost.cluster.nodes.bit_length()) if 2**i < cost.cluster.nodes]
    clusters = [cost.cluster.nodes, *reversed(smaller if request.weight < 1.0 else [])]
    until = time.monotonic() + request.time_limit
    made: list[PlanResult] = []
    for left, nodes in zip(range(len(clusters), 0, -1), clusters, strict=True):
        share = replace(request, time_limit=max(LEAST_SEARCH_SECONDS, (until - time.monotonic()) / left))
        try:
            made.append(_on(workload, cost, nodes, share, report))
        except (FuseError, KeyboardInterrupt):
            # Fewer nodes, less memory: from here on nothing fits.
            if not made:
                raise
            break
        if made[-1].search.stopped:
            break
    whole = made[0]

    def score(m: PlanResult) -> float:
        # Per device-second where devices have no price.
        money = (m.nodes * m.search.seconds) / (whole.nodes * whole.search.seconds)
        return request.weight * m.search.seconds / whole.search.seconds + (1.0 - request.weight) * money

    return min(made, key=score)


def checked(workload: Workload, cost: AnalyticCost, request: PlanRequest) -> PlanRequest:
    """Return the request, its engines narrowed to engines that can serve it; raise a FuseError, before any compilation
    or search, where none can."""
    if not 0.0 <= request.weight <= 1.0:
        raise FuseError(f"weight={request.weight}: needs 0 (money) to 1 (time)")
    if cost.cluster.devices > MOST_PLANNED_DEVICES:
        raise FuseError(f"plan: {cost.cluster.devices} devices; needs at most {MOST_PLANNED_DEVICES}")
    if "placement" in request.features:
        request = _deferring(workload, request)
    return _pipelined(workload, request) if "pipeline" in request.features else request


def _deferring(workload: Workload, request: PlanRequest) -> PlanRequest:
    """Keep, of the engines asked for, only the engine whose critic can learn while the next step generates; raise a
    FuseError where none can."""
    if workload.critic is None:
        raise FuseError(
            f"feature placement: algorithm={workload.algorithm} has no critic to train beside generation; needs ppo"
        )
    if not request.strategies:
        return request
    if "pipeline" in request.features:
        raise FuseError("feature placement: feature pipeline trains actor and critic together; plan for one of the two")
    if "fsdp" not in request.strategies:
        raise FuseError(
            f"feature placement: strategy={', '.join(request.strategies)} trains the critic beside the actor; needs "
            "strategy fsdp"
        )
    return replace(request, strategies=("fsdp",))


def _pipelined(workload: Workload, request: PlanRequest) -> PlanRequest:
    """Keep, of the engines asked for, only engines that can train actor and critic as one pipeline; raise a FuseError
    where none can."""
    if workload.critic is None:
        raise FuseError(
            f"feature pipeline: trains actor and critic together, and algorithm={workload.algorithm} has no critic; "
            "needs ppo"
        )
    if "megatron" not in request.strategies:
        asked = f"strategy={', '.join(request.strategies)}" if request.strategies else "an ideal plan"
        raise FuseError(f"feature pipeline: {asked} has no pipeline that a run could fuse; needs strategy megatron")
    return replace(request, strategies=("megatron",))


def _on(
    workload: Workload, cost: AnalyticCost, nodes: int, request: PlanRequest, report: Callable[[str], None]
) -> PlanResult:
    cost = replace(cost, cluster=replace(cost.cluster, nodes=nodes))
    until = time.monotonic() + request.time_limit
    if not request.strategies:
        report(f"costs of every option on {cost.cluster.devices} devices")
        space = full_space(workload, cost, until, "placement" in request.features)
        report("searching")
        best = best_plan(space, move_seconds(workload, cost), max(LEAST_SEARCH_SECONDS, until - time.monotonic()))
        return _made(workload, cost, best, None, request)
    found: dict[Strategy, SearchResult] = {}
    refused: list[str] = []
    for left, strategy in zip(range(len(request.strategies), 0, -1), request.strategies, strict=True):
        seconds = max(LEAST_SEARCH_SECONDS, (until - time.monotonic()) / left)
        try:
            found[strategy] = best_executable(workload, cost, strategy, seconds, request.features, report)
        except FuseError as error:
            refused.append(str(error))
        except KeyboardInterrupt:
            if not found:
                raise
            found = {name: replace(plan, stopped=True) for name, plan in found.items()}
        if any(plan.stopped for plan in found.values()):
            break
    if not found:
        raise FuseError("; ".join(refused))
    best = min(found, key=lambda strategy: found[strategy].seconds)
    # Each engine looked at, in the order asked for, was found or refused.
    rest = request.strategies[len(found) + len(refused) :]
    unsearched = (*(f"some placements of {name}" for name, plan in found.items() if not plan.bound), *rest)
    return replace(_made(workload, cost, found[best], best, request), unsearched=unsearched)


def _made(
    workload: Workload, cost: AnalyticCost, found: SearchResult, strategy: str | None, request: PlanRequest
) -> PlanResult:
    calls = found.space.plan(found.choice)
    cluster = cost.cluster
    overrides = {}
    if strategy is not None:
        rows = zip(workload.calls, calls, found.choice, strict=True)
        chosen = {c.name: (c, plan.mesh, found.space.configs[found.space.config[o]]) for c, plan, o in rows}
        overrides = placement_overrides(workload, cluster, strategy, chosen)
    features = tuple(request.features) if strategy is not None else ("realloc", *request.features)
    if found.space.tables.deferred < 0:
        # Nothing was faster than the critic beside the actor.
        features = tuple(name for name in features if name != "placement")
    plan = Plan(
        calls,
        features=features,
        replicas=calls[0].layout.dp,
        strategy=strategy,
        overrides=overrides,
        predicted=predicted(found, handing_over(workload, cost)),
    )
    # A threshold counts on inference on released devices (fuse.interstage.layout=slices), which plans for Megatron do
    # not.
    if "interstage" in request.features and strategy != "megatron":
        plan = replace(plan, migration_threshold=threshold(workload, plan, cost))
    if "pipeline" in request.features:
        # Seconds are of serial training: whether a fused schedule is faster is decided while the run goes on.
        plan = replace(plan, schedule="auto")
    price = cluster.price_per_device_hour / 3600 * cluster.devices
    return PlanResult(plan, found, cluster.nodes, price * found.seconds)


def predicted(found: SearchResult, handing: float) -> dict[str, float]:
    """Return the seconds of every call and of moving weights to it, of the step, and the seconds that no plan of the
    same kind can beat. `handing`: seconds of generation in the search that belong to its weights."""
    choice = np.array(found.choice)
    starts, ends = np.empty(2 * choice.size), np.empty(2 * choice.size)
    step = schedule(found.space.tables, choice, EVALUATED_STEPS, starts, ends)
    count = len(found.space.calls)
    calls = {call.name: float(ends[c] - starts[c]) for c, call in enumerate(found.space.calls)}
    moves = {
        f"{call.name}_weights": float(ends[count + c] - starts[count + c])
        for c, call in enumerate(found.space.calls)
        if not np.isnan(ends[count + c])
    }
    if handing:
        calls["actor_generate"] -= handing
        moves["actor_generate_weights"] = moves.get("actor_generate_weights", 0.0) + handing
    return {**calls, **moves, "step": float(step), "bound": found.bound}


def threshold(workload: Workload, plan: Plan, cost: AnalyticCost) -> float:
    """Return the fraction of unfinished samples at which to migrate, by simulation (verl_fuse/simulate)."""
    apart = ("reward", "critic") if "placement" in plan.features else ("reward",)
    scored: Sequence = [call for call in workload.calls if call.kind == "infer" and call.role not in apart]
    found, _ = chosen_threshold(workload, plan, cost, False, tuple(scored), of_plan(SimulationOptions(), plan))
    return found.threshold / workload.sequences
