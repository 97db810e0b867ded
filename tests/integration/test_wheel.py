"""`pip install verl-fuse` in an empty environment: the planning side works, training names the packages it lacks."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from verl_fuse import __version__

pytestmark = pytest.mark.integration

REPO = Path(__file__).resolve().parents[2]
# Tests may run with the repository on the path; the installed wheel must do without it.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in the folder $VERL_FUSE_DIST, which a release is about to publish, or one
    built here in the same way."""
    if given := os.environ.get("VERL_FUSE_DIST"):
        (built,) = Path(given).absolute().glob("*.whl")
        return built
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPO)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and its base dependencies only."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=True)
    pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--prefer-binary"]
    subprocess.run(
        [*pip, "--constraint", str(REPO / "ci/stacks/newest/constraints.txt"), str(wheel)], check=True, env=CLEAN
    )
    return home / "bin/python"


def verl_fuse(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python.parent / "verl-fuse"), *arguments]
    return subprocess.run(command, cwd=python.parent, env=CLEAN, capture_output=True, text=True, timeout=300)


def test_the_wheel_holds_library_plugins_patches_recipes_and_licence(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"verl_fuse-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {
        "hydra_plugins",
        "verl_fuse",
        "verl_fuse_cpu",
        "verl_fuse_elastic",
        "verl_fuse_interstage",
        "verl_fuse_observe",
        "verl_fuse_pipeline",
        "verl_fuse_placement",
        "verl_fuse_realloc",
        "verl_fuse_speculation",
        "verl_fuse_update",
        "verl_fuse_patches",
        "verl_fuse_recipes",
        f"verl_fuse-{__version__}.dist-info",
    }
    assert {
        "hydra_plugins/verl_fuse_searchpath.py",
        "verl_fuse/host/config/fuse/default.yaml",
        "verl_fuse_recipes/ppo-cpu/config.yaml",
        "verl_fuse_recipes/ppo-cpu/README.md",
        f"verl_fuse-{__version__}.dist-info/licenses/LICENSE",
    } <= set(names)


def test_the_wheel_holds_every_file_of_its_packages(wheel: Path):
    folders = {
        "verl_fuse": "verl_fuse",
        "verl_fuse_cpu": "plugins/verl_fuse_cpu",
        "verl_fuse_elastic": "plugins/verl_fuse_elastic",
        "verl_fuse_interstage": "plugins/verl_fuse_interstage",
        "verl_fuse_observe": "plugins/verl_fuse_observe",
        "verl_fuse_pipeline": "plugins/verl_fuse_pipeline",
        "verl_fuse_placement": "plugins/verl_fuse_placement",
        "verl_fuse_realloc": "plugins/verl_fuse_realloc",
        "verl_fuse_speculation": "plugins/verl_fuse_speculation",
        "verl_fuse_update": "plugins/verl_fuse_update",
        "verl_fuse_patches": "patches/verl_fuse_patches",
        "verl_fuse_recipes": "recipes",
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", *folders.values()], cwd=REPO, check=True, stdout=subprocess.PIPE, text=True
    )
    missing = [
        path
        for path in tracked.stdout.splitlines()
        for package, folder in folders.items()
        if path.startswith(f"{folder}/") and package + path.removeprefix(folder) not in names
    ]
    assert missing == []


def test_every_package_of_the_wheel_is_typed(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.split("/")[0] for name in names if name.count("/") == 1 and name.endswith("/__init__.py")}
    assert len(packages) == 11
    assert [package for package in sorted(packages) if f"{package}/py.typed" not in names] == []


def test_the_entry_points_are_declared(wheel: Path):
    text = zipfile.ZipFile(wheel).read(f"verl_fuse-{__version__}.dist-info/entry_points.txt").decode()
    assert (
        "[verl.plugins]\nverl_fuse = verl_fuse.host.entry:register\nverl_fuse_cpu = verl_fuse_cpu.entry:register"
        in text
    )


def test_the_base_install_has_neither_torch_nor_ray_nor_verl(python: Path):
    code = "import json, importlib.metadata as m; print(json.dumps([d.name.lower() for d in m.distributions()]))"
    shown = subprocess.run([str(python), "-c", code], check=True, env=CLEAN, stdout=subprocess.PIPE, text=True)
    names = set(json.loads(shown.stdout))
    assert "verl-fuse" in names
    guide = (REPO / "verl_fuse/README.md").read_text()
    (own,) = re.findall(r"brings (\d+) packages", guide)
    assert len(names - {"verl-fuse", "pip", "setuptools"}) == int(own)
    assert not names & {"torch", "ray", "verl", "transferqueue", "vllm", "hydra-core", "transformers"}


def test_recipes_are_listed(python: Path):
    result = verl_fuse(python, "recipes")
    assert result.returncode == 0, result.stderr
    for name in ("ppo-cpu", "grpo-cpu", "ppo-gsm8k-8gpu", "grpo-gsm8k-8gpu"):
        assert name in result.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("schedule", "--help"), ("trace", "--help"), ("run", "--help")])
def test_commands_explain_themselves(python: Path, arguments: tuple[str, ...]):
    result = verl_fuse(python, *arguments)
    assert result.returncode == 0, result.stderr
    assert "Usage: verl-fuse" in result.stdout


def test_the_version_is_the_version(python: Path):
    assert verl_fuse(python, "--version").stdout == f"verl-fuse {__version__}\n"


def test_a_run_without_verl_names_the_extra(python: Path):
    result = verl_fuse(python, "run", "ppo-cpu")
    assert result.returncode == 2
    assert result.stderr.startswith("verl-fuse: ")
    assert "verl is not installed" in result.stderr
    assert "pip install 'verl-fuse[verl]'" in result.stderr


def test_an_unknown_recipe_is_answered_with_the_choices(python: Path):
    result = verl_fuse(python, "run", "nosuch")
    assert result.returncode == 2
    assert result.stderr.startswith("verl-fuse: ")
    assert "nosuch" in result.stderr
    assert "ppo-cpu" in result.stderr


def test_doctor_names_the_extra_and_fails(python: Path):
    result = verl_fuse(python, "doctor", "--json")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    found = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    for package in ("verl", "TransferQueue", "ray"):
        assert (found[package]["state"], found[package]["fix"]) == ("fault", "pip install 'verl-fuse[verl]'")
