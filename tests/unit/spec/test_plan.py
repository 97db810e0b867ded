"""Plans: JSON form and refusals."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Workload

PLAN = Plan(
    calls=(
        CallPlan("actor_generate", Mesh(0, 16), Layout(tp=2, dp=8)),
        CallPlan("actor_train", Mesh(0, 16), Layout(tp=4, pp=2, dp=2), microbatches=4, offload=True),
    ),
    features=("interstage", "realloc"),
    migration_threshold=0.2,
    replicas=8,
    schedule="fused",
    strategy="megatron",
    overrides={"trainer.nnodes": 2, "critic.use_dynamic_bsz": True},
    predicted={"step": 12.5},
)


def test_the_json_form_parses_back(tmp_path: Path):
    PLAN.write(tmp_path / "plan.json")
    read = Plan.read(tmp_path / "plan.json")
    assert read == PLAN
    assert read.predicted == {"step": 12.5}
    assert read.call("actor_train").layout == Layout(tp=4, pp=2, dp=2)
    assert read.devices == 16


def broken(**changes: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a verl-fuse plan"),
        ("[]", "plan version None"),
        (broken(version=9), "plan version 9; this release reads 1"),
        (broken(speed=1), "plan.speed: unknown key"),
        (broken(calls=[]), r"plan.calls=\[\]; needs a list"),
        (broken(calls=[{"call": "x"}]), r"plan.calls\[0\]: missing mesh, layout"),
        (broken(calls=[{"call": "x", "mesh": [0, 4], "layout": "dp8"}]), "needs 8 devices, its mesh has 4"),
        (broken(calls=[{"call": "x", "mesh": [0], "layout": "dp1"}]), r"plan.calls\[0\].mesh=\[0\]: needs a list of 2"),
        (broken(calls=[{"call": "x", "mesh": [0, 1], "layout": "dp1", "microbatches": 0}]), "microbatches=0"),
        (broken(calls=[{"call": "x", "mesh": [0, 1], "layout": "dp1"}] * 2), "needs each call once"),
        (broken(features=["speed"]), "feature 'speed'; allowed: interstage, pipeline, realloc, elastic, placement"),
        (broken(migration_threshold=2.0), "migration_threshold=2.0; needs 0 to 1"),
        (broken(replicas=0), "replicas=0"),
        (broken(schedule="portfolio"), "schedule='portfolio'; allowed: auto, fused, serial, or null"),
        (broken(features=["placement"]), "feature 'placement'; needs a call critic_train, and replicas"),
        (broken(strategy="deepspeed"), "strategy='deepspeed'; allowed: fsdp, megatron, or null"),
        (broken(overrides={"trainer": {"nnodes": 2}}), "plan.overrides.trainer="),
        (broken(overrides=[]), r"plan.overrides=\[\]; needs a block"),
        (broken(predicted={"step": "fast"}), "plan.predicted.step='fast'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FuseError, match=rf"plan\.json: {message}|plan\.json: .*{message}"):
        Plan.read(tmp_path / "plan.json")


def test_a_plan_may_be_yaml_with_comments(tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("# mine\nversion: 1\ncalls:\n  - {call: x, mesh: [0, 4], layout: tp2 dp2}\n")
    assert str(Plan.read(tmp_path / "plan.yaml").call("x").layout) == "tp2 dp2"
    (tmp_path / "plan.yaml").write_text("version: [")
    with pytest.raises(FuseError, match=r"plan\.yaml: not YAML: "):
        Plan.read(tmp_path / "plan.yaml")


def test_an_unknown_call_lists_the_calls():
    with pytest.raises(FuseError, match="no call 'critic_train'; there is actor_generate, actor_train"):
        PLAN.call("critic_train")


WORKLOAD = Workload.from_dict(
    {"algorithm": "grpo", "prompts": 8, "prompt": "fixed:8", "response": "fixed:8", "actor": "llama-7b"}
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layout": Layout(tp=3), "mesh": Mesh(0, 3)},
            "plan of actor_train: layout tp3 for llama-7b: tp=3; needs a divisor of heads=32",
        ),
        ({"mesh": Mesh(8, 8)}, "plan of actor_train: devices 8-15; the cluster has 8, from 0 on"),
        ({"call": "critic_train"}, "plan: no call 'actor_train'"),
    ],
)
def test_a_plan_that_does_not_divide_the_model_or_lies_outside_the_cluster_is_refused(changes, message):
    plans = [CallPlan(call.name, Mesh(0, 8), Layout(tp=8)) for call in WORKLOAD.calls]
    Plan(tuple(plans)).check(WORKLOAD, cluster_named("h100"))
    plans[-1] = dataclasses.replace(plans[-1], **changes)
    with pytest.raises(FuseError, match=re.escape(message)):
        Plan(tuple(plans)).check(WORKLOAD, cluster_named("h100"))


def test_what_a_plan_says_beside_the_keys_of_verl_has_names_under_fuse():
    both = dataclasses.replace(PLAN, features=("interstage", "pipeline"))
    assert both.switches == ("interstage", "pipeline")
    assert both.settings == {"interstage.migration_threshold": 0.2, "pipeline.schedule": "fused"}
    critic = CallPlan("critic_train", Mesh(12, 4), Layout(dp=4, shards=4))
    apart = dataclasses.replace(PLAN, calls=(*PLAN.calls, critic), features=("placement",), replicas=6)
    assert apart.switches == ("elastic",)
    assert apart.settings == {
        "placement.critic": {"first": 12, "devices": 4},
        "placement.defer": True,
        "elastic.max_replicas": 6,
    }


def test_predicted_seconds_have_the_names_of_stages():
    predicted = {"actor_generate": 8.0, "actor_generate_weights": 0.5, "actor_train": 2.0, "bound": 9.0, "step": 10.5}
    plan = dataclasses.replace(PLAN, predicted=predicted)
    assert plan.planned_seconds == {"gen": 8.0, "update_weights": 0.5, "update_actor": 2.0, "step": 10.5}
