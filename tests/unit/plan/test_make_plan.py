import dataclasses
import json
import re
import shlex
import time
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner
from workloads import grpo, ppo

import verl_fuse.plan
from verl_fuse.cli.group import build
from verl_fuse.cli.main import GROUPS, main
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError
from verl_fuse.plan.finished_plan import PlanRequest, make_plan
from verl_fuse.plan.overrides import feature_overrides
from verl_fuse.simulate.compare import compare
from verl_fuse.simulate.options import SimulationOptions, of_plan
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.plan import STRATEGIES, Plan
from verl_fuse.spec.step import Refusal
from verl_fuse_pipeline.refusals import refusals
from verl_fuse_placement.refusals import refusals as placement_refusals

app = build(GROUPS)

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
    made = make_plan(ppo(), AnalyticCost(cluster_named("h100", 1)), PlanRequest(("megatron",), time_limit=10.0))
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
    made = make_plan(grpo(), AnalyticCost(cluster_named("h100", 1)), PlanRequest(()))
    assert (made.plan.strategy, made.plan.features, made.plan.overrides) == (None, ("realloc",), {})


def test_a_threshold_is_for_engines_that_can_infer_on_released_devices():
    fsdp, megatron = (
        make_plan(ppo(), AnalyticCost(cluster_named("h100", 1)), PlanRequest((strategy,), ("interstage",))).plan
        for strategy in STRATEGIES
    )
    assert 0.0 < fsdp.migration_threshold <= 1.0
    assert feature_overrides(fsdp) == {
        "fuse.interstage.enabled": True,
        "fuse.interstage.layout": "slices",
        "fuse.interstage.migration_threshold": fsdp.migration_threshold,
    }
    assert megatron.migration_threshold == 0.0
    assert feature_overrides(megatron) == {"fuse.interstage.enabled": True}


@pytest.mark.parametrize("strategies", [STRATEGIES, ("megatron",)])
def test_a_pipeline_is_planned_for_engines_and_layouts_that_have_one(strategies):
    cost = AnalyticCost(cluster_named("h100", 1))
    # The fastest serial plan has none.
    assert make_plan(ppo("qwen2.5-3b"), cost, PlanRequest(strategies)).plan.call("actor_train").layout.pp == 1
    plan = make_plan(ppo("qwen2.5-3b"), cost, PlanRequest(strategies, ("pipeline",))).plan
    assert (plan.strategy, plan.features, plan.schedule) == ("megatron", ("pipeline",), "auto")
    assert feature_overrides(plan) == {"fuse.pipeline.enabled": True, "fuse.pipeline.schedule": "auto"}
    assert refused_by_the_plugin(plan) == []


def test_a_critic_apart_is_planned_where_it_gains_and_its_replicas_are_parked():
    # Few samples, and a critic that is larger than the actor.
    critic = model_named("qwen2.5-7b").as_value_model()
    long = dataclasses.replace(ppo("qwen2.5-0.5b"), prompts=32, minibatches=1, critic=critic)
    cost = AnalyticCost(cluster_named("h100", 1))
    plan = make_plan(long, cost, PlanRequest(features=("placement",))).plan
    critic, generate = plan.call("critic_train").mesh, plan.call("actor_generate").mesh
    assert (plan.strategy, plan.features, generate.end) == ("fsdp", ("placement",), critic.first)
    assert plan.replicas == plan.call("actor_generate").layout.dp
    block = {"first": critic.first, "devices": critic.size}
    assert plan.settings == {"placement.critic": block, "placement.defer": True, "elastic.max_replicas": plan.replicas}
    assert feature_overrides(plan) == {
        "fuse.elastic.enabled": True,
        "fuse.placement.critic": f"{{first:{critic.first},devices:{critic.size}}}",
        "fuse.placement.defer": True,
        "fuse.elastic.max_replicas": plan.replicas,
    }
    assert list(placement_refusals(as_composed(plan).get)) == []
    assert plan.predicted["step"] < make_plan(long, cost, PlanRequest(("fsdp",))).plan.predicted["step"]


def as_composed(plan: Plan) -> dict[str, object]:
    """What a refusal reads of a run on accelerators with this plan."""
    return {
        "trainer.v1.trainer_mode": "fuse",
        "algorithm.adv_estimator": "gae",
        "trainer.device": "cuda",
        "critic.strategy": "fsdp2",
        "actor_rollout_ref.rollout.n": 1,
        "critic.ppo_mini_batch_size": 4,
        "fuse.elastic.enabled": True,
        **plan.overrides,
        **{f"fuse.{key}": value for key, value in plan.settings.items()},
    }


def test_the_critic_stays_where_devices_of_its_own_gain_nothing():
    short = dataclasses.replace(ppo(), prompts=512, response=LengthDistribution.parse("fixed:16"))
    plan = make_plan(short, AnalyticCost(cluster_named("h100", 1)), PlanRequest(features=("placement",))).plan
    assert (plan.features, plan.settings) == ((), {})
    assert plan.call("critic_train").mesh == plan.call("actor_generate").mesh


@pytest.mark.parametrize(
    ("workload", "request_", "message"),
    [
        (grpo(), PlanRequest(features=("placement",)), "feature placement: algorithm=grpo has no critic"),
        (
            ppo(),
            PlanRequest(("megatron",), ("placement",)),
            "feature placement: strategy=megatron .* needs strategy fsdp",
        ),
        (
            ppo(),
            PlanRequest(features=("placement", "pipeline")),
            "feature placement: feature pipeline trains actor and",
        ),
    ],
)
def test_a_critic_apart_that_no_run_carries_out_is_refused(workload, request_, message):
    with pytest.raises(FuseError, match=message):
        make_plan(workload, AnalyticCost(cluster_named("h100", 1)), request_)


def test_a_model_that_fits_only_offloaded_has_a_pipeline_that_the_run_accepts():
    small = cluster_named("h100", 1)
    tight = AnalyticCost(dataclasses.replace(small, device=dataclasses.replace(small.device, memory=35.0 * 2**30)))
    assert make_plan(ppo(), tight, PlanRequest(("megatron",))).plan.call("actor_train").offload
    plan = make_plan(ppo(), tight, PlanRequest(("megatron",), ("pipeline",))).plan
    assert plan.call("actor_train").offload
    assert refused_by_the_plugin(plan) == []


def refused_by_the_plugin(plan: Plan) -> list[Refusal]:
    values = {
        "fuse.pipeline.enabled": True,
        "trainer.v1.trainer_mode": "fuse",
        "algorithm.adv_estimator": "gae",
        **plan.overrides,
    }
    values |= {"actor_rollout_ref.actor.strategy": "megatron", "critic.strategy": "megatron"}
    return list(refusals(values.get))


@pytest.mark.parametrize(
    ("workload", "strategies", "devices", "message"),
    [
        (grpo(), STRATEGIES, 8, "feature pipeline: .* algorithm=grpo has no critic; needs ppo"),
        (ppo(), ("fsdp",), 8, "feature pipeline: strategy=fsdp has no pipeline .* needs strategy megatron"),
        (ppo(), (), 8, "feature pipeline: an ideal plan has no pipeline"),
        (ppo(), STRATEGIES, 1, "megatron on 1 devices with feature pipeline .at least 2 pipeline stages.*: no layout"),
    ],
)
def test_what_cannot_train_as_one_pipeline_is_refused(workload, strategies, devices, message):
    cluster = dataclasses.replace(cluster_named("h100", 1), devices_per_node=devices)
    with pytest.raises(FuseError, match=message):
        make_plan(workload, AnalyticCost(cluster), PlanRequest(strategies, ("pipeline",)))


def test_with_interstage_a_reward_model_has_devices_of_its_own():
    cost = AnalyticCost(cluster_named("h100", 1))
    plan = make_plan(ppo(reward="qwen2.5-0.5b"), cost, PlanRequest(("fsdp",), ("interstage",))).plan
    assert not plan.call("reward_infer").mesh.overlaps(plan.call("actor_train").mesh)
    assert plan.overrides["reward.reward_model.enable_resource_pool"] is True


def interrupted_at(number: int):
    """Something to report to that is interrupted at its `number`th text."""
    texts: list[str] = []

    def report(text: str) -> None:
        texts.append(text)
        if len(texts) == number:
            raise KeyboardInterrupt

    return report, texts


def test_ctrl_c_keeps_the_best_plan_so_far_and_claims_no_bound():
    cost, request = AnalyticCost(cluster_named("h100", 2)), PlanRequest(("megatron",))
    whole = make_plan(ppo(), cost, request)
    with pytest.raises(KeyboardInterrupt):
        make_plan(ppo(), cost, request, interrupted_at(2)[0])
    report, texts = interrupted_at(4)
    made = make_plan(ppo(), cost, request, report)
    assert len(texts) == 4
    assert texts[3].startswith("megatron: placement 3, ")
    assert made.search.stopped
    assert (made.search.bound, whole.search.stopped) == (0.0, False)
    assert made.unsearched == ("some placements of megatron",)
    assert made.search.seconds >= whole.search.seconds
    assert f"{made.search.seconds:.2f} s per step so far" in texts[3]


def test_ctrl_c_in_the_second_engine_keeps_the_plan_of_the_first():
    cost = AnalyticCost(cluster_named("h100", 1))
    fsdp = make_plan(ppo(), cost, PlanRequest(("fsdp",)))
    report, texts = interrupted_at(10**9)
    make_plan(ppo(), cost, PlanRequest(("fsdp",)), report)
    made = make_plan(ppo(), cost, PlanRequest(), interrupted_at(len(texts) + 1)[0])
    assert (made.plan.strategy, made.search.stopped, made.unsearched) == ("fsdp", True, ("megatron",))
    assert made.search.seconds == fsdp.search.seconds


def test_the_time_limit_is_for_all_engines_and_placements():
    begun = time.monotonic()
    made = make_plan(ppo(reward="qwen2.5-7b"), AnalyticCost(cluster_named("h100", 64)), PlanRequest(time_limit=1.0))
    assert made.search.feasible
    # A placement is costed and searched to its end, on a busy machine too.
    assert time.monotonic() - begun < 20


def test_options_that_are_too_many_for_the_time_limit_are_refused():
    with pytest.raises(
        FuseError, match=r"--time-limit is over: [0-5] of 6 calls have the costs of their options on 512"
    ):
        make_plan(ppo(), AnalyticCost(cluster_named("h100", 64)), PlanRequest((), time_limit=0.01))


def test_an_interrupted_command_prints_its_plan(workload_file, tmp_path, monkeypatch, capsys):
    def stopped(workload, cost, request, report):
        return make_plan(workload, cost, request, interrupted_at(3)[0])

    monkeypatch.setattr("verl_fuse.cli.plan.make_plan", stopped)
    out = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as end:
        main(["plan", str(workload_file), "h100x2", "--strategy", "megatron", "--out", str(out)])
    said = capsys.readouterr()
    assert end.value.code == 0
    assert said.err == "verl-fuse: interrupted; this is the best plan so far\n"
    assert "\nnot looked at: some placements of megatron; a longer --time-limit may find a better plan\n" in said.out
    assert Plan.read(out).strategy == "megatron"


def test_what_compiling_took_is_said_where_it_took_the_limit(workload_file, monkeypatch, capsys):
    monkeypatch.setattr("verl_fuse.cli.plan.compile_kernels", lambda: time.sleep(0.6))
    with pytest.raises(SystemExit) as end:
        main(["plan", str(workload_file), "h100", "--strategy", "fsdp", "--time-limit", "0.5"])
    assert end.value.code == 0
    assert "kernels were compiled for longer than --time-limit 0.5" in capsys.readouterr().err


def test_money_takes_fewer_nodes_than_time():
    cost, request = AnalyticCost(cluster_named("h100", 8)), PlanRequest(("fsdp",), time_limit=4.0)
    fast, cheap = (make_plan(grpo(), cost, dataclasses.replace(request, weight=weight)) for weight in (1.0, 0.0))
    assert fast.nodes == 8
    assert cheap.nodes < 8
    assert cheap.cost_per_step < fast.cost_per_step
    assert cheap.search.seconds > fast.search.seconds
    with pytest.raises(FuseError, match="weight=2: needs 0"):
        make_plan(grpo(), cost, dataclasses.replace(request, weight=2))


def test_the_command_prints_a_table_and_writes_the_plan(workload_file, tmp_path):
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--strategy", "fsdp", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "fsdp, 8 x H100:" in result.output
    assert json.loads(out.read_text())["strategy"] == "fsdp"


def test_a_place_that_cannot_be_written_is_refused_before_planning(workload_file, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_fuse.cli.plan.make_plan", lambda *_: pytest.fail("planned first"))
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--out", str(tmp_path / "nodir" / "x.json")])
    assert "nodir/x.json: cannot be written" in str(result.exception)


def test_the_command_prints_overrides_and_nothing_else(workload_file):
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--strategy", "megatron", "--verl"])
    lines = result.stdout.split()
    assert lines[:3] == ["model_engine=megatron", "+fuse=default", "trainer.v1.trainer_mode=fuse"]
    assert {"algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.name=vllm"} <= {*lines}
    assert {line.split("=")[0]: line.split("=")[1] for line in lines if "/path/to/" in line} == {
        "actor_rollout_ref.model.path": "/path/to/qwen2.5-0.5b",
        "critic.model.path": "/path/to/qwen2.5-0.5b",
        "data.train_files": "/path/to/train.parquet",
        "data.val_files": "/path/to/validation.parquet",
    }
    assert all("=" in line for line in lines)


def test_a_block_in_braces_is_one_word_of_a_shell(workload_file, monkeypatch):
    block = {"fuse.placement.critic": "{nodes: 1, devices: 2}"}
    monkeypatch.setattr("verl_fuse.cli.plan.all_overrides", lambda workload, made: block)
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", "--strategy", "megatron", "--verl"])
    assert shlex.split(result.stdout)[-1] == "fuse.placement.critic={nodes: 1, devices: 2}"


def test_the_overrides_switch_the_features_on(workload_file):
    features = ["--feature", "interstage", "--feature", "pipeline"]
    result = CliRunner().invoke(app, ["plan", str(workload_file), "h100", *features, "--verl"])
    lines = result.stdout.split()
    assert lines[0] == "model_engine=megatron"
    assert {"fuse.interstage.enabled=true", "fuse.pipeline.enabled=true"} <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h100x0"], "nodes=0; needs a whole number >= 1"),
        (["h100", "--strategy", "deepspeed"], "--strategy deepspeed: allowed: fsdp, megatron"),
        (["h100", "--ideal", "--verl"], "--ideal plans need reallocation"),
        (["h100", "--feature", "elastic"], "--feature elastic: allowed: interstage, pipeline, placement"),
        (["h100", "--strategy", "fsdp", "--feature", "pipeline"], "feature pipeline: strategy=fsdp has no pipeline"),
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_is_simulated_as_it_was_planned(strategy: Literal["fsdp", "megatron"]):
    cost, workload = cost_model(cluster_named("h100")), grpo()
    made = make_plan(workload, cost, PlanRequest((strategy,), time_limit=10.0))
    rows = compare(workload, cost, ["realloc"], 4, made.plan)
    simulated = next(row for row in rows if row.strategy == "realloc")
    assert simulated.seconds.mean == pytest.approx(made.search.seconds, rel=0.10)
    assert made.plan.predicted["actor_generate_weights"] >= cost.engine.sync
    assert made.plan.overrides["actor_rollout_ref.rollout.gpu_memory_utilization"] < 0.93
    options = of_plan(SimulationOptions(), made.plan)
    assert options.max_num_seqs == made.plan.overrides["actor_rollout_ref.rollout.max_num_seqs"]
    assert of_plan(SimulationOptions(max_num_seqs=7), made.plan).max_num_seqs == 7
