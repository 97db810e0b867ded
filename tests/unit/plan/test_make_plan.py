import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner
from workloads import grpo, ppo

import verl_fuse.plan
from verl_fuse.cli.main import app, main
from verl_fuse.cost.analytic import Analytic
from verl_fuse.errors import FuseError
from verl_fuse.plan.make import Request, make
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.plan import Plan

WORKLOAD = """
algorithm: ppo
prompts: 64
prompt: "fixed:256"
response: "lognormal:median=200,sigma=1.0,max=512"
actor: qwen2.5-0.5b
critic: qwen2.5-0.5b
reference: qwen2.5-0.5b
minibatches: 2
"""


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "step.yaml"
    path.write_text(WORKLOAD)
    return path


def test_an_executable_plan_carries_its_overrides_and_predictions():
    made = make(ppo(), Analytic(cluster_named("h100", 1)), Request(("megatron",), time_limit=10.0))
    plan, train = made.plan, made.plan.call("actor_train").layout
    assert (plan.strategy, plan.features, made.nodes) == ("megatron", (), 1)
    assert plan.overrides["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == train.tp
    assert plan.overrides["critic.megatron.pipeline_model_parallel_size"] == train.pp
    assert plan.overrides["trainer.n_gpus_per_node"] == 8
    assert plan.replicas == plan.call("actor_generate").layout.dp
    serial = sum(seconds for call, seconds in plan.predicted.items() if call not in ("step", "bound"))
    assert plan.predicted["step"] == pytest.approx(serial)
    assert plan.predicted["bound"] <= plan.predicted["step"]
    assert Plan.from_json(plan.to_json()) == plan


def test_an_ideal_plan_needs_reallocation():
    made = make(grpo(), Analytic(cluster_named("h100", 1)), Request(()))
    assert (made.plan.strategy, made.plan.features, made.plan.overrides) == (None, ("realloc",), {})


def test_features_fill_in_threshold_and_schedule():
    request = Request(("megatron",), features=("interstage", "pipeline"))
    plan = make(ppo(), Analytic(cluster_named("h100", 1)), request).plan
    assert 0.0 <= plan.migration_threshold <= 1.0
    assert plan.schedule == "portfolio"


def test_money_takes_fewer_nodes_than_time():
    cost, request = Analytic(cluster_named("h100", 8)), Request(("fsdp",), time_limit=4.0)
    fast, cheap = (make(grpo(), cost, dataclasses.replace(request, weight=weight)) for weight in (1.0, 0.0))
    assert fast.nodes == 8
    assert cheap.nodes < 8
    assert cheap.cost_per_step < fast.cost_per_step
    assert cheap.found.seconds > fast.found.seconds
    with pytest.raises(FuseError, match="weight=2: needs 0"):
        make(grpo(), cost, dataclasses.replace(request, weight=2))


def test_the_command_prints_a_table_and_writes_the_plan(workload_file, tmp_path):
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--strategy", "fsdp", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "fsdp, 8 x H100:" in result.output
    assert json.loads(out.read_text())["strategy"] == "fsdp"


def test_a_place_that_cannot_be_written_is_refused_before_planning(workload_file, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_fuse.cli.plan.make", lambda *_: pytest.fail("planned first"))
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--out", str(tmp_path / "nodir" / "x.json")])
    assert "nodir/x.json: cannot be written" in str(result.exception)


def test_the_command_prints_overrides_and_nothing_else(workload_file):
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--strategy", "megatron", "--verl"])
    lines = result.output.split()
    assert lines[:3] == ["model_engine=megatron", "+fuse=default", "trainer.v1.trainer_mode=fuse"]
    assert "algorithm.adv_estimator=gae" in lines
    assert all("=" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h100x0"], "nodes=0; needs a whole number >= 1"),
        (["h100", "--strategy", "deepspeed"], "--strategy deepspeed: allowed: fsdp, megatron"),
        (["h100", "--ideal", "--verl"], "--ideal plans need reallocation"),
        (["h100", "--feature", "elastic"], "--feature elastic: allowed: interstage, pipeline"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_bad_arguments_are_refused(workload_file, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(workload_file), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_every_command_of_the_readme_runs(workload_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = Path(verl_fuse.plan.__file__).with_name("README.md").read_text()
    commands = re.findall(r"^verl-fuse (plan .*?) +#", readme, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        arguments = command.replace("h100x4", "h100x1").split()
        assert CliRunner().invoke(app, arguments).exit_code == 0, command
    assert Plan.read(tmp_path / "plan.json").strategy in ("fsdp", "megatron")
