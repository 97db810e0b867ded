import dataclasses

import numpy as np
import pytest
from spaces import random_move, random_space
from workloads import grpo, ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.plan.heuristic import megatron_heuristic, predicted_seconds
from verl_fuse.plan.planner import best_plan, full_space, move_seconds
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.units import GIB


def test_the_plan_is_never_slower_than_the_heuristic_and_its_time_is_the_predicted_one():
    workload, cost = ppo("llama-7b"), AnalyticCost(cluster_named("a100", 2))
    found = best_plan(full_space(workload, cost), move_seconds(workload, cost), 60.0)
    assert found.seconds <= predicted_seconds(megatron_heuristic(workload, cost), workload, cost)
    assert predicted_seconds(found.space.plan(found.choice), workload, cost) == pytest.approx(found.seconds)


def test_the_heuristic_is_serial():
    workload, cost = ppo("llama-7b"), AnalyticCost(cluster_named("a100", 2))
    plans = megatron_heuristic(workload, cost)
    assert {str(plan.layout) for plan in plans} == {"tp8 pp2"}
    assert {plan.mesh.size for plan in plans} == {16}
    assert np.isfinite(predicted_seconds(plans, workload, cost))


def test_a_model_that_fits_nowhere_names_the_call_and_the_memory_it_needs():
    cost = AnalyticCost(cluster_named("l40s", 1))
    with pytest.raises(
        FuseError, match=r"actor_generate of llama-3.1-405b on 8 x L40S: needs at least (\d+\.\d) GiB per device"
    ):
        full_space(grpo("llama-3.1-405b"), cost)


def test_a_plan_that_does_not_fit_says_how_much_memory_would_do():
    space = random_space(1, options=4, tight=0.2)
    tight = space.tables.limit
    small = dataclasses.replace(space, tables=space.tables._replace(limit=tight * GIB))
    for name in ("resident", "active", "copy"):
        small = dataclasses.replace(small, tables=small.tables._replace(**{name: getattr(small.tables, name) * GIB}))
    with pytest.raises(
        FuseError, match=rf"no plan found fits into {tight:.1f} GiB per device; the leanest one needs (\d+\.\d)"
    ) as error:
        best_plan(small, random_move, 5.0)
    enough = (float(str(error.value).split("needs ")[1].split(" GiB")[0]) + 0.1) * GIB
    roomy = dataclasses.replace(small, tables=small.tables._replace(limit=enough))
    assert best_plan(roomy, random_move, 5.0).feasible
