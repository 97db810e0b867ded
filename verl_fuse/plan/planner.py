"""Finds the best plan of a workload under a cost model."""

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.call_configs import configs_on_sizes, least_bytes
from verl_fuse.plan.descent import bytes_needed
from verl_fuse.plan.meshes import legal_meshes
from verl_fuse.plan.search import SearchResult, search
from verl_fuse.plan.space import CallConfig, MoveSeconds, PlanSpace
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.units import GIB
from verl_fuse.spec.workload import Call, Workload


def best_plan(space: PlanSpace, move: MoveSeconds, time_limit: float) -> SearchResult:
    """Search a space; if no plan fits, a FuseError says how much memory would suffice."""
    found = search(space, move, time_limit)
    if not found.feasible:
        t = space.tables
        raise FuseError(
            f"no plan found fits into {t.limit / GIB:.1f} GiB per device; the leanest one needs "
            f"{bytes_needed(t, found.seconds) / GIB:.1f} GiB"
        )
    return found


def full_space(workload: Workload, cost: AnalyticCost, until: float = math.inf, defers: bool = False) -> PlanSpace:
    """Return every legal option of every call that fits alone (`--ideal`), with `defers` for steps whose critic is
    trained while the next step generates; a FuseError names a call that fits nowhere, or says that the time was over
    before all options had their costs (`until` is a `time.monotonic` value)."""
    cluster, limit = cost.cluster, cost.cluster.device.memory
    meshes = legal_meshes(cluster)
    sizes = sorted({mesh.size for mesh in meshes})
    found: list[tuple[CallConfig, ...]] = []

    def in_time() -> Iterator[int]:
        for size in sizes:
            if time.monotonic() > until:
                raise FuseError(
                    f"--time-limit is over: {len(found)} of {len(workload.calls)} calls have the costs of their "
                    f"options on {cluster.devices} devices; more time or fewer devices would do"
                )
            yield size

    for call in workload.calls:
        found.append(configs_on_sizes(call, workload, cost, in_time(), limit))
    for call, of_call in zip(workload.calls, found, strict=True):
        if not of_call:
            raise FuseError(_nowhere(call, workload, cost, sizes))
    return PlanSpace.build(workload.calls, cluster, found, meshes, limit, defers=defers)


def _nowhere(call: Call, workload: Workload, cost: AnalyticCost, sizes: Sequence[int]) -> str:
    model, device = workload.model(call.role).name, cost.cluster.device
    least = least_bytes(call, workload, cost, sizes)
    where = f"{call.name} of {model} on {cost.cluster.devices} x {device.name}"
    if np.isfinite(least):
        return f"{where}: needs at least {least / GIB:.1f} GiB per device, which have {device.memory / GIB:.1f} GiB"
    return (
        f"{where}: no legal layout divides the model and the {workload.sequences} sequences of a step in "
        f"{workload.minibatches} mini-batches"
    )


def move_seconds(workload: Workload, cost: AnalyticCost) -> MoveSeconds:
    """Return the costs by the cost model; weights that wait in host memory are loaded first."""

    def seconds(role: str, train: tuple[Mesh, CallConfig], user: tuple[Mesh, CallConfig]) -> float:
        model = workload.model(role)  # type: ignore[arg-type]
        (mesh, config), (user_mesh, user_config) = train, user
        moved = cost.transfer(model, (mesh, config.layout), (user_mesh, user_config.layout))
        if config.offload:
            moved += cost.offload(cost.memory(model, "infer", config.layout).weights)
        return moved

    return seconds
