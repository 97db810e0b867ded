"""Installed but not asked for, verl-fuse changes nothing of verl."""

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
