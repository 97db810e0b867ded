"""Makes the plan that people use without a planner, on Megatron: tensor parallel within the node, pipeline parallel
over nodes, every call everywhere."""

from collections.abc import Sequence

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.plan.call_configs import compute, generate
from verl_fuse.plan.descent import OVERFULL, exact_cost
from verl_fuse.plan.generation import GenerationEstimates
from verl_fuse.plan.planner import move_seconds
from verl_fuse.plan.space import PlanSpace
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan
from verl_fuse.spec.workload import Workload


def megatron_heuristic(workload: Workload, cost: AnalyticCost) -> tuple[CallPlan, ...]:
    """Return the plan tp = devices of a node, pp = nodes, dp = 1; micro-batches as ReaL counts them (arXiv
    2406.14088)."""
    cluster = cost.cluster
    layout, mesh = Layout(tp=cluster.devices_per_node, pp=cluster.nodes), Mesh(0, cluster.devices)
    microbatches = {"generate": 1, "infer": layout.pp, "train": 2 * layout.pp if layout.pp > 1 else 1}
    return tuple(CallPlan(call.name, mesh, layout, microbatches[call.kind]) for call in workload.calls)


def predicted_seconds(plan: Sequence[CallPlan], workload: Workload, cost: AnalyticCost) -> float:
    """Return the seconds per step of any plan; infinite if it does not fit."""
    generation = GenerationEstimates(workload, cost)
    configs = []
    for call, of_call in zip(workload.calls, plan, strict=True):
        layout, parts = of_call.layout, of_call.microbatches
        config = (
            generate(workload, cost, layout, parts, generation)
            if call.kind == "generate"
            else compute(call, workload, cost, layout, parts, of_call.offload)
        )
        configs.append((config,))
    meshes = [of_call.mesh for of_call in plan]
    space = PlanSpace.build(workload.calls, cost.cluster, configs, meshes, cost.cluster.device.memory)
    # A mesh may be listed twice: one option per call is enough.
    options = [space.tables.begin[c] + np.argmax(space.mesh[space.config == c] == c) for c in range(len(meshes))]
    seconds = exact_cost(space, move_seconds(workload, cost), options)
    return seconds if seconds < OVERFULL else float("inf")
