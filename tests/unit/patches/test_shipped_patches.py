"""Invariants of every patch of this package."""

import subprocess
import sys

import pytest

from ci.upstream.report import READ_AT
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse_patches import registry
from verl_fuse_patches.constants import with_constant

MECHANISM = {"__init__", "constants", "registry"}


def test_every_module_of_the_package_is_a_listed_patch(repo):
    modules = {path.stem for path in (repo / "patches" / "verl_fuse_patches").glob("*.py")} - MECHANISM
    assert modules == set(registry.NAMES)


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_patch_says_what_why_and_until_when(name, repo):
    patch = registry.load(name)
    assert patch.name == name
    assert patch.upstream.startswith("https://github.com/")
    assert patch.reason
    assert patch.remove_when
    assert f"`{name}`" in (repo / "patches" / "README.md").read_text()


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_patch_fits_the_installed_version(name):
    patch = registry.load(name)
    if registry.status([patch])[0].state == "not needed":
        pytest.skip("its defect cannot occur here")
    registry.check_version(patch)
    registry.check_source(patch)


@pytest.mark.parametrize("found", READ_AT["vllm"])
# Of vllm_cpu_recovered only 0.24 lacks the argument.
@pytest.mark.parametrize("name", ["vllm_cpu_expand", "vllm_cpu_rows", "vllm_cpu_weights", "vllm_distribution"])
def test_a_patch_of_vllm_takes_every_version_that_was_read(name, found, monkeypatch):
    monkeypatch.setattr(registry, "_version", lambda patch: found)
    registry.check_version(registry.load(name))


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_changed_target_is_refused(name, tmp_path, monkeypatch):
    patch = registry.load(name)
    if registry.status([patch])[0].state == "not needed":
        pytest.skip("its defect cannot occur here")
    tree = SourceTree.installed(patch.module.partition(".")[0])
    lines = tree.path(patch.module).read_text().splitlines()
    lines[tree.find(f"{patch.module}:{patch.qualnames[-1]}").node.end_lineno - 1] += "; pass"
    changed = tmp_path / "changed.py"
    changed.write_text("\n".join(lines))
    monkeypatch.setattr(SourceTree, "path", lambda self, module: changed)
    with pytest.raises(
        FuseError,
        match=f"patch '{name}' of {patch.module}.*expected fingerprint {registry.check_version(patch)}, found ",
    ):
        registry.check_source(patch)


def test_asking_for_the_status_imports_nothing_heavy():
    program = (
        "import sys; from verl_fuse_patches.registry import status; assert len(status()) == 26;"
        "print([name for name in ('torch', 'ray', 'verl', 'vllm', 'zmq') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_constant_is_changed_and_nothing_else():
    def backend(device, *, sep=","):
        """Doc."""
        return f"cpu:gloo,{device}" + sep + "cpu:gloo,"[:3]

    changed = with_constant(backend, "cpu:gloo,", "")
    assert (changed("cpu"), backend("cpu")) == ("cpu,", "cpu:gloo,cpu,cpu")
    assert (changed.__doc__, changed.__qualname__) == (backend.__doc__, backend.__qualname__)
    nested = with_constant(lambda kind: kind in ("cuda", "npu"), "cuda", "cpu")
    assert (nested("cpu"), nested("cuda"), nested("npu")) == (True, False, True)
    with pytest.raises(FuseError, match="has no constant 'nccl'"):
        with_constant(backend, "nccl", "")
