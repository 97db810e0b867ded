"""A critic with devices of its own, on which nothing generates: the placements there are for a plan, and
what then waits for what.

Invariants (tests/unit/simulate/test_placement.py):
- a placement changes where generation and the critic's calls are, and nothing else;
- the critic has whole replicas' devices, the last ones, and fits their memory; at least one replica generates;
- generation waits for the new weights of the actor, values for the critic's update of the step before, which begins
  once the weights are sent.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import replica_layout
from verl_fuse.simulate.stock import as_inference, fastest
from verl_fuse.simulate.tasks import Task
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.timeline import UPDATE_WEIGHTS
from verl_fuse.spec.workload import Workload

GENERATE, VALUES_CALL, CRITIC_TRAIN = "actor_generate", "critic_infer", "critic_train"


@lru_cache(maxsize=64)
def placements(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions) -> tuple[Plan, ...]:
    """Return the plans in which the critic is apart: on the devices of 1, 2, 4, ... replicas."""
    if workload.critic is None:
        return ()
    generate = plan.call(GENERATE)
    replica = replica_layout(generate.layout)
    found, size = [], replica.devices
    while size < generate.mesh.size:
        placed = _placed(workload, plan, cost, options, size)
        found += [placed] if placed else []
        size *= 2
    return tuple(found)


def is_apart(plan: Plan) -> bool:
    """Tell whether the critic is trained on devices where no replica generates."""
    calls = {call.call: call.mesh for call in plan.calls}
    return CRITIC_TRAIN in calls and not calls[CRITIC_TRAIN].overlaps(calls[GENERATE])


def deferred(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of a step whose critic is trained beside the generation of the next step. The critic's task goes
    last, behind the weight sync, where both are ready at once."""
    by_name = {task.name: task for task in tasks}
    sync, train = by_name[UPDATE_WEIGHTS], by_name.pop(CRITIC_TRAIN)
    values, generate = by_name[VALUES_CALL], by_name[GENERATE]
    before = tuple(name for name in generate.after_previous if name != CRITIC_TRAIN)
    by_name[GENERATE] = replace(generate, after_previous=before)
    by_name[VALUES_CALL] = replace(values, after_previous=(*values.after_previous, CRITIC_TRAIN))
    return [*by_name.values(), replace(train, after=(*train.after, sync.name))]


def _placed(workload: Workload, plan: Plan, cost: AnalyticCost, options: SimulationOptions, size: int) -> Plan | None:
    """Return the plan with the critic on the last `size` of the devices that generate; None where it does not fit
    there, or the replicas left do not fit a layout."""
    generate = plan.call(GENERATE)
    left = Mesh(generate.mesh.first, generate.mesh.size - size)
    layout = replace(generate.layout, dp=generate.layout.dp * left.size // generate.mesh.size)
    if layout.devices != left.size:
        return None
    critic = {call.name: call for call in workload.calls if call.role == "critic"}
    try:
        train = fastest(workload, critic[CRITIC_TRAIN], cost, options, Mesh(left.end, size))
    except FuseError:
        # It fits on more devices, or on none.
        return None
    changed = {
        GENERATE: CallPlan(GENERATE, left, layout, generate.microbatches, generate.offload),
        CRITIC_TRAIN: train,
        VALUES_CALL: as_inference(workload, critic[VALUES_CALL], train),
    }
    return replace(plan, calls=tuple(changed.get(call.call, call) for call in plan.calls))
