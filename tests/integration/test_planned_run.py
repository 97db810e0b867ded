"""A plan made by `verl-fuse plan` for two CPU devices, carried out by a real run (`fuse.plan`)."""

import re

import pytest
from omegaconf import OmegaConf
from verl_runs import run

from verl_fuse.spec.plan import Plan
from verl_fuse.spec.run_config import find_config
from verl_fuse.timeline.files import page_of

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


def test_a_run_carries_out_what_the_plan_says(planned, plan_file):
    overrides = Plan.read(plan_file).overrides
    tokens = overrides["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert f"fuse.plan sets actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens} (was 16384)" in planned.output
    assert "fuse.plan sets actor_rollout_ref.actor.use_dynamic_bsz=true (was false)" in planned.output
    assert [(account["samples"], account["missing"]) for account in planned.accounts().values()] == [(24, 0)] * 4
    assert list(planned.metrics) == [1, 2, 3, 4]


def test_every_stage_has_the_seconds_planned_beside_those_it_took(planned, plan_file):
    foreseen = Plan.read(plan_file).planned_seconds
    assert {"gen", "ref", "values", "update_critic", "update_actor", "step"} <= set(foreseen)
    for metrics in planned.metrics.values():
        logged = {stage: metrics[f"fuse/planned_seconds/{stage}"] for stage in foreseen}
        assert logged == pytest.approx(foreseen)
        assert all(metrics[f"timing_s/{stage}"] > 0 for stage in foreseen if stage != "step")
    page = page_of(planned.folder, 2)
    assert page is not None
    rows = re.findall(r"<tr><th>(\w+)</th>", page.read_text().split("Planned and measured")[1].split("</table>")[0])
    assert set(rows) >= {"gen", "ref", "values", "update_critic", "update_actor"}


def test_the_run_keeps_the_configuration_that_it_had(planned, plan_file):
    kept = find_config(planned.folder)
    assert kept is not None
    assert kept.trainer.v1.trainer_mode == "fuse"
    overrides = {key.removeprefix("++"): value for key, value in Plan.read(plan_file).overrides.items()}
    assert {key: OmegaConf.select(kept, key) for key in overrides} == overrides


def test_a_run_on_another_number_of_devices_refuses_the_plan(verl_home, plan_file):
    done = run(verl_home, "ppo-cpu", f"fuse.plan={plan_file}", "trainer.n_gpus_per_node=1", name="refused")
    assert done.code != 0
    assert "this run cannot carry it out" in done.output
    assert "it is for trainer.n_gpus_per_node=2, this run has 1" in done.output
