"""The gain our search predicts over ReaL's Megatron heuristic, on the cost model that `test_real_throughput.py` holds
against the heuristic's bars.

No constant is fitted to a gain. Only settings whose proof ends within seconds; all 33 are in verl_fuse/plan/README.md.
"""

import pytest
from real_settings import Setting, settings

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import EAGER
from verl_fuse.plan.heuristic import megatron_heuristic, predicted_seconds
from verl_fuse.plan.planner import best_plan, full_space, move_seconds

SMALL = [s for s in settings() if s.devices <= 16 or (s.devices == 32 and s.kind != "critic")]


@pytest.mark.parametrize("setting", SMALL, ids=lambda setting: setting.name)
def test_the_best_plan_is_proven_and_faster_than_the_heuristic(setting: Setting):
    workload, cost = setting.workload, AnalyticCost(setting.cluster, EAGER)
    found = best_plan(full_space(workload, cost), move_seconds(workload, cost), 600.0)
    heuristic = predicted_seconds(megatron_heuristic(workload, cost), workload, cost)
    assert found.gap < 2e-6
    # ReaL measured 1.08 to 1.69 here; a planner that promised several times that would be wrong somewhere.
    assert 1.2 < heuristic / found.seconds < 2.5
