"""Plans that stock verl 0.9.1 with verl-fuse can run today (`--executable`).

What it can run (the invariants; tests/unit/plan/test_executable.py):
- actor, critic and reference share one pool of devices; a reward model may have a pool of its own;
- on FSDP, with the feature `placement`, the critic may be alone on the last devices, where nothing generates: its
  update is then deferred, and the replica that is parked there keeps the memory that it has;
- on Megatron they share one layout as well: colocated engines silently take the first one's
  (verl/workers/engine/megatron);
- on FSDP a role is sharded over its whole mesh or over a part that divides it, with its own sequence-parallel size;
  inference runs in the layout of training;
- rollout replicas are tensor parallel within a node, with weights of their own; so is the reward model's engine;
- a setting that a feature refuses at run time (plugins/verl_fuse_pipeline/refusals.py, plugins/verl_fuse_interstage) is
  not planned for it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.bound import least_seconds
from verl_fuse.plan.call_configs import configs_in_layouts
from verl_fuse.plan.descent import bytes_needed
from verl_fuse.plan.generation import GenerationEstimates
from verl_fuse.plan.layouts import legal_layouts
from verl_fuse.plan.planner import move_seconds
from verl_fuse.plan.search import SearchResult, search
from verl_fuse.plan.space import CallConfig, PlanSpace
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import Strategy
from verl_fuse.spec.units import GIB
from verl_fuse.spec.workload import Call, Workload

# Seconds a space gets when the time is over, and after which no more spaces are looked at.
LEAST_SEARCH_SECONDS, OVERTIME_SECONDS = 0.05, 1.0
# A run with the feature demands this of the placement.
DEMANDS = {
    "interstage": "a reward model, if there is one, on devices of its own",
    "pipeline": "at least 2 pipeline stages, no expert parallelism",
    "placement": "the critic beside the actor, or alone on the last devices",
}


@dataclass(frozen=True)
class DevicePools:
    """The devices that actor and reference have, and the devices of the reward model and of the critic; None: the same.
    No replica generates on the critic's devices."""

    main: Mesh
    reward: Mesh | None = None
    critic: Mesh | None = None

    def of(self, call: Call) -> Mesh:
        """Return the devices of a call."""
        if call.kind == "generate" and self.critic:
            return Mesh(self.main.first, self.critic.first - self.main.first)
        own = {"reward": self.reward, "critic": self.critic}.get(call.role)
        return own or self.main


def best_executable(
    workload: Workload,
    cost: AnalyticCost,
    strategy: Strategy,
    time_limit: float,
    features: Collection[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Return the best plan over pools and trainer layouts that the features allow; if none fits, a FuseError says how
    much memory would suffice.

    Ctrl-C, once there is a plan, ends the search with the best one so far. `report` is told the search under way.
    """
    found: list[SearchResult] = []
    space: PlanSpace | None = None
    until = time.monotonic() + time_limit
    stopped = whole = False
    options = 0
    report(f"{strategy}: costs of layouts on {cost.cluster.devices} devices")
    try:
        for number, space in enumerate(spaces(workload, cost, strategy, features), 1):
            if stopped or (time.monotonic() > until + OVERTIME_SECONDS and any(f.feasible for f in found)):
                break
            best = min((f.seconds for f in found), default=None)
            report(f"{strategy}: placement {number}" + (f", {best:.2f} s per step so far" if best else ""))
            options += space.config.size
            if best is not None and least_seconds(space.tables) >= best:
                continue
            # Most spaces are searched within milliseconds.
            found.append(
                search(space, move_seconds(workload, cost), max(LEAST_SEARCH_SECONDS, until - time.monotonic()))
            )
            stopped = found[-1].stopped
        else:
            whole = True
    except KeyboardInterrupt:
        if not any(f.feasible for f in found):
            raise
        stopped = True
    demanded = "".join(f" with feature {name} ({DEMANDS[name]})" for name in features)
    if space is None:
        raise FuseError(
            f"{strategy} on {cost.cluster.devices} devices{demanded}: no layout divides the models, the "
            f"{workload.sequences} sequences of a step and their {workload.minibatches} mini-batches"
        )
    fastest = min(found, key=lambda f: f.seconds)
    if not fastest.feasible:
        limit = space.tables.limit
        raise FuseError(
            f"{strategy}{demanded}: no plan fits into {limit / GIB:.1f} GiB per device; the leanest one needs "
            f"{bytes_needed(space.tables, fastest.seconds) / GIB:.1f} GiB, {_fullest(fastest)}"
        )
    return dataclasses.replace(
        fastest,
        # Nothing is known of spaces that were not looked at.
        bound=min(f.bound for f in found) if whole else 0.0,
        stopped=stopped,
        options=options,
        nodes=sum(f.nodes for f in found),
        elapsed=sum(f.elapsed for f in found),
    )


def _fullest(found: SearchResult) -> str:
    """Return the call of a plan that needs most by itself, and what it needs that for."""
    space = found.space
    configs = [space.configs[space.config[option]] for option in found.choice]
    call, config = max(zip(space.calls, configs, strict=True), key=lambda pair: pair[1].peak)
    return (
        f"{call.name} in {config.layout} with {config.microbatches} micro-batches alone {config.peak / GIB:.1f} GiB: "
        f"{config.resident / GIB:.1f} between calls, {config.active / GIB:.1f} more while it runs, "
        f"{config.copy / GIB:.1f} of copied weights"
    )


def spaces(
    workload: Workload, cost: AnalyticCost, strategy: Strategy, features: Collection[str] = ()
) -> Iterator[PlanSpace]:
    """Yield one space per choice of pools and trainer layouts; in each, calls are free only in micro-batching, offload
    and rollout layout."""
    generation = GenerationEstimates(workload, cost)
    # Memory is not checked here, so that the search can say how much memory would suffice.
    unlimited = math.inf
    fused = "pipeline" in features
    for pools in _pools(workload, cost.cluster, features):
        free: list[tuple[CallConfig, ...]] = []
        for call in workload.calls:
            if call.kind == "generate" or call.role == "reward":
                layouts = _replicas(workload, call, pools, cost.cluster)
                free.append(configs_in_layouts(call, workload, cost, layouts, unlimited, generation))
            else:
                free.append(())
        for chosen in _trainer_layouts(workload, strategy, pools, cost.cluster):
            if fused and any(chosen[role].pp < 2 or chosen[role].ep > 1 for role in ("actor", "critic")):
                continue
            tied = [
                of_call or configs_in_layouts(call, workload, cost, (chosen[call.role],), unlimited, generation)
                for call, of_call in zip(workload.calls, free, strict=True)
            ]
            if all(tied):
                yield from _spaces(workload.calls, cost.cluster, tied, pools)


def _spaces(
    calls: Sequence[Call], cluster: Cluster, configs: Sequence[Sequence[CallConfig]], pools: DevicePools
) -> Iterator[PlanSpace]:
    """Yield the space of these configurations, or, where replicas are parked beside the critic, one space per
    engine."""
    if pools.critic is None:
        yield _space(calls, cluster, configs, pools)
        return
    (generate,) = (c for c, call in enumerate(calls) if call.kind == "generate")
    for engine in configs[generate]:
        parked = engine.active + engine.copy
        beside = [
            tuple(dataclasses.replace(config, active=config.active + parked) for config in of_call)
            if (call.role, call.kind) == ("critic", "train")
            else of_call
            for call, of_call in zip(calls, configs, strict=True)
        ]
        beside[generate] = (engine,)
        yield _space(calls, cluster, beside, pools)


def _space(
    calls: Sequence[Call], cluster: Cluster, configs: Sequence[Sequence[CallConfig]], pools: DevicePools
) -> PlanSpace:
    meshes = tuple(dict.fromkeys(map(pools.of, calls)))
    defers = pools.critic is not None
    space = PlanSpace.build(calls, cluster, configs, meshes, cluster.device.memory, shares=False, defers=defers)
    owner = np.repeat(np.arange(len(calls)), np.diff(space.tables.begin))
    home = np.array([meshes.index(pools.of(call)) for call in calls])
    return space.keep(space.mesh == home[owner])


def _pools(workload: Workload, cluster: Cluster, features: Collection[str]) -> Iterator[DevicePools]:
    """Yield one pool for all calls, unless the reward model shares with no call, or whole nodes (of a single node:
    devices) for the reward model; of each choice, where the feature is asked for, 1, 2, 4, ... devices for the critic
    alone."""
    for pools in _shared_pools(workload, cluster, "interstage" not in features):
        yield pools
        sizes = (2**i for i in range(pools.main.size.bit_length())) if "placement" in features else ()
        for size in (size for size in sizes if size < pools.main.size):
            yield dataclasses.replace(pools, critic=Mesh(pools.main.end - size, size))


def _shared_pools(workload: Workload, cluster: Cluster, shared: bool) -> Iterator[DevicePools]:
    if shared or workload.reward is None:
        yield DevicePools(Mesh(0, cluster.devices))
    if workload.reward is None:
        return
    unit = cluster.devices_per_node if cluster.nodes > 1 else 1
    count = cluster.devices // unit
    for taken in (2**i for i in range(count.bit_length()) if 2**i < count):
        main = Mesh(0, cluster.devices - taken * unit)
        yield DevicePools(main, Mesh(main.end, taken * unit))


def _replicas(workload: Workload, call: Call, pools: DevicePools, cluster: Cluster) -> list[Layout]:
    """Return equal engines, each tensor parallel within a node; whole engines are parked on the critic's devices."""
    model, mesh = workload.model(call.role), pools.of(call)
    per_node = min(cluster.devices_per_node, mesh.size)
    parked = pools.critic.size if pools.critic and call.kind == "generate" else 0
    fits = [2**i for i in range(per_node.bit_length()) if not (per_node % 2**i or mesh.size % 2**i or parked % 2**i)]
    layouts = [Layout(tp=tp, dp=mesh.size // tp) for tp in fits]
    return [layout for layout in layouts if layout.fault(model) is None]


def _trainer_layouts(
    workload: Workload, strategy: Strategy, pools: DevicePools, cluster: Cluster
) -> Iterator[Mapping[str, Layout]]:
    """Yield the layout of each role that trains or infers on the training workers."""
    size = {"critic": (pools.critic or pools.main).size}
    roles = [role for role in ("actor", "critic", "reference") if getattr(workload, role) is not None]
    legal = {
        role: [
            layout
            for layout in legal_layouts(
                workload.model(role),  # type: ignore[arg-type]
                "train",
                workload,
                size.get(role, pools.main.size),
                cluster.devices_per_node,
            )
            if bool(layout.shards) == (strategy == "fsdp")
        ]
        for role in roles
    }
    for layout in legal["actor"]:
        if strategy == "megatron":
            if all(layout in legal[role] for role in roles):
                yield dict.fromkeys(roles, layout)
        else:
            for critic in legal.get("critic", [layout]):
                yield {role: critic if role == "critic" else layout for role in roles}
