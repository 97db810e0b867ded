"""Installed but not asked for, or switched off by VERL_FUSE=off, verl-fuse changes nothing of verl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).parent / "support/verl_fingerprint.py"
# The additive registration that makes `trainer_mode=fuse` possible: one more name in verl's own registry.
REGISTRY = "verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY"
# What verl's plugin loader remembers of the policy that this test itself varies.
LOADER = {"verl._allowed", "verl._plugins_policy"}


def fingerprint(plugins: str, **extra: str) -> dict:
    """Return the view of verl in a process, with verl's plugin policy `plugins` ("auto", verl's default, or names to
    load)."""
    kept = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    env = {**kept, "VERL_USE_EXTERNAL_PLUGINS": plugins, "PYTHONHASHSEED": "0", **extra}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index('{"attributes"') :])
    return {**found, "attributes": {name: text for name, text in found["attributes"].items() if name not in LOADER}}


@pytest.fixture(scope="module")
def without() -> dict:
    return fingerprint("no_such_plugin")


@pytest.fixture(scope="module")
def installed() -> dict:
    return fingerprint("auto")


def test_no_attribute_of_verl_differs_but_for_the_one_registered_name(without, installed):
    before, after = without["attributes"], installed["attributes"]
    assert len(before) > 1000
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [REGISTRY]
    added = after[REGISTRY].keys() - before[REGISTRY].keys()
    assert added == {"fuse"}
    assert {name: after[REGISTRY][name] for name in before[REGISTRY]} == before[REGISTRY]


def test_without_the_plugin_nothing_of_ours_is_loaded(without):
    assert without["ours"] == []


def test_installed_but_off_neither_platform_nor_patches_are_loaded(installed):
    assert [name for name in installed["ours"] if name.startswith("verl_fuse_patches")] == []
    assert "verl_fuse_cpu.platform" not in installed["ours"]


def test_the_comparison_can_fail(without):
    """A changed attribute shows: the same process with the cpu platform on, which patches verl."""
    changed = fingerprint("auto", VERL_PLATFORM="cpu")["attributes"]
    different = {name for name in without["attributes"] if without["attributes"][name] != changed.get(name)}
    assert "verl.utils.distributed.initialize_global_process_group_ray" in different


@pytest.fixture(scope="module")
def switched_off() -> dict:
    return fingerprint("auto", VERL_FUSE="off")


def test_switched_off_mode_fuse_is_verls_own_trainer_and_nothing_else_of_ours_is_loaded(without, switched_off):
    before, after = without["attributes"], switched_off["attributes"]
    assert [name for name in before if before[name] != after[name]] == [REGISTRY]
    assert {name: after[REGISTRY][name] for name in before[REGISTRY]} == before[REGISTRY]
    assert after[REGISTRY]["fuse"].startswith("class verl_fuse.host.switch.stock_trainer.<locals>.StockTrainer ")
    assert {name for name in switched_off["ours"] if not name.startswith("verl_fuse_cpu")} == {
        "verl_fuse",
        "verl_fuse.errors",
        "verl_fuse.host",
        "verl_fuse.host.entry",
        "verl_fuse.host.names",
        "verl_fuse.host.switch",
        "verl_fuse.host.upstream",
        "verl_fuse.host.upstream.on_import",
        "verl_fuse.host.upstream.targets",
    }


def test_the_trainer_of_a_switched_off_run_is_made_by_verl_from_a_configuration_without_the_block():
    program = """
import json
from omegaconf import OmegaConf
import verl.trainer.ppo.v1 as v1
v1.PPOTrainerSync.__init__ = lambda self, config: setattr(self, "config", config)
config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "fuse"}}, "fuse": {"preset": "fast"}, "data": {"a": 1}})
OmegaConf.set_struct(config, True)
made = v1.get_trainer_cls("fuse")(config=config)
assert type(made) is v1.PPOTrainerSync and made.config is config
print(json.dumps(OmegaConf.to_container(config)))
"""
    env = {**os.environ, "VERL_FUSE": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said, config = done.stdout.splitlines()[-2:]
    assert said == "verl-fuse: VERL_FUSE=off: verl's own trainer trains, and the block fuse is not read"
    assert json.loads(config) == {"trainer": {"v1": {"trainer_mode": "sync"}}, "data": {"a": 1}}


def test_workers_of_a_cluster_that_was_started_without_the_variable_get_it():
    program = """
import os
import ray
from ray.cluster_utils import Cluster
from verl_fuse.host.switch import reach_workers

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
os.environ["VERL_FUSE"] = "off"
found = []
for step in (lambda: None, lambda: reach_workers(cluster.address)):
    step()
    ray.init(cluster.address, runtime_env={"env_vars": {"GIVEN": "1"}}, log_to_driver=False)
    found.append(ray.get(ray.remote(lambda: (os.environ.get("VERL_FUSE"), os.environ.get("GIVEN"))).remote()))
    ray.shutdown()
cluster.shutdown()
print(found)
"""
    kept = {name: value for name, value in os.environ.items() if name not in ("VERL_FUSE", "RAY_RUNTIME_ENV_HOOK")}
    done = subprocess.run([sys.executable, "-c", program], env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[(None, '1'), ('off', '1')]"
