"""The overrides of a plan compose on verl's own configuration, pass verl's own checks, and carry the plan's values;
`fuse.plan` applies them."""

import json
import os
import subprocess
import sys

import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.plan.finished_plan import PlanRequest, make_plan
from verl_fuse.plan.overrides import command_line, feature_overrides, path_overrides, workload_overrides
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.plan import STRATEGIES
from verl_fuse.spec.workload import Workload

pytestmark = pytest.mark.integration

# One process for all plans: importing verl takes most of the time. A tiny model stands in for the planned one;
# nothing of it is trained.
SCRIPT = """
import json, os, sys
from pathlib import Path
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl_fuse.host.start.applied_plan import apply_plan
from verl_fuse.host.start.settings import load_settings
from verl_fuse_cpu.task.tokenizer import build_tokenizer
from verl_fuse_cpu.task.warm_start import build_model

model, plans = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
tokenizer = build_tokenizer()
tokenizer.save_pretrained(model)
build_model(tokenizer).save_pretrained(model)
paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
searchpath = "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_fuse.host.config]"


def composed(arguments):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[searchpath, *arguments, *paths])
    OmegaConf.resolve(config)
    return config


def flat(node, prefix=""):
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for key, value in node.items() for k, v in flat(value, f"{prefix}.{key}".strip(".")).items()}


def differences(config, other):
    left, right = (flat(OmegaConf.to_container(each)) for each in (config, other))
    changed = {key for key in {*left, *right} if left.get(key) != right.get(key)} - {"fuse.plan"}
    return {key: [left.get(key), right.get(key)] for key in changed}


def checked(config):
    reference, critic = need_reference_policy(config), need_critic(config)
    validate_config(config, reference, critic)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return [reference, critic]


found = {}
for name, plan in plans.items():
    config = composed(plan["arguments"])
    roles = checked(config)
    blocks = load_settings(config).blocks
    on = sorted(name for name in ("interstage", "pipeline") if blocks[name].enabled)
    migrates = [blocks["interstage"].layout, blocks["interstage"].migration_threshold]
    wanted = {key.lstrip("+"): value for key, value in plan["overrides"].items()}
    wrong = {key: OmegaConf.select(config, key) for key in wanted if OmegaConf.select(config, key) != wanted[key]}
    # The same through fuse.plan: only what is trained is composed, the rest is applied.
    applied = composed([*plan["bare"], f"fuse.plan={plan['file']}"])
    apply_plan(applied, load_settings(applied).overrides)
    checked(applied)
    # The reference only infers, so that the actor's recomputation, which verl hands on to it, means nothing there.
    unused = ("actor_rollout_ref.ref.megatron.override_transformer_config", *([] if roles[1] else ["critic"]))
    unlike = {key: values for key, values in differences(config, applied).items() if not key.startswith(unused)}
    found[name] = [*roles, on, migrates, wrong, unlike]
print("FOUND " + json.dumps(found))
"""


def workloads() -> dict[str, Workload]:
    model, prompt, response = (
        model_named("qwen2.5-7b"),
        LengthDistribution.parse("fixed:512"),
        LengthDistribution.parse("uniform:1-1024"),
    )
    reward = model.as_value_model()
    return {
        "ppo": Workload("ppo", 256, 1, prompt, response, model, reward, model, minibatches=4),
        "ppo-reward": Workload("ppo", 256, 1, prompt, response, model, reward, model, reward, minibatches=4),
        "grpo": Workload("grpo", 64, 4, prompt, response, model, None, model, minibatches=2),
        "grpo-bypass": Workload("grpo", 64, 4, prompt, response, model, None, None, epochs=2, old_log_prob=False),
    }


CASES = [
    *((name, strategy) for name in workloads() for strategy in STRATEGIES),
    ("ppo", "fsdp", "interstage"),
    ("ppo-reward", "fsdp", "interstage"),
    ("grpo", "megatron", "interstage"),
    ("ppo", "megatron", "interstage", "pipeline"),
]


def test_plans_compose_and_pass_verls_checks(tmp_path):
    plans, expected = {}, {}
    for name, strategy, *features in CASES:
        workload = workloads()[name]
        plan = make_plan(
            workload, AnalyticCost(cluster_named("h100", 2)), PlanRequest((strategy,), tuple(features))
        ).plan
        case = " ".join((name, strategy, *features))
        file = tmp_path / f"{case}.json"
        plan.write(file)
        needed = path_overrides(workload)
        trained = {**workload_overrides(workload), **feature_overrides(plan)}
        overrides = {**trained, **plan.overrides}
        started = {key: plan.overrides[key] for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}
        plans[case] = {
            "arguments": command_line(strategy, {**needed, **overrides}),
            "bare": command_line(strategy, {**needed, **trained, **started}),
            "overrides": overrides,
            "file": str(file),
        }
        slices = strategy == "fsdp" and "interstage" in features
        migrates = ["slices", plan.migration_threshold or None] if slices else ["shared", None]
        expected[case] = [name != "grpo-bypass", name.startswith("ppo"), features, migrates, {}, {}]
    listing = tmp_path / "plans.json"
    listing.write_text(json.dumps(plans))
    environment = {**os.environ, "VERL_PLATFORM": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), str(listing)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    # needs a reference policy, needs a critic, features that are on, layout and threshold of migration, keys with
    # another value, differences through fuse.plan
    assert json.loads(line.removeprefix("FOUND ")) == expected
