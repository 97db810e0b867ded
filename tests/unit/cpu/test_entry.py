"""The entry point: nothing when off, loud when it fails."""

import os
import subprocess
import sys

import pytest


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.parametrize("platform", ["", "nvidia"])
def test_off_imports_nothing_and_sets_nothing(platform):
    program = (
        "import os, sys; before = set(sys.modules), dict(os.environ)\n"
        "import verl_fuse_cpu.entry as entry\n"
        "print(sorted(name for name in set(sys.modules) - before[0] if name.startswith(('verl', 'torch', 'ray', "
        "'packaging'))))\n"
        "print(dict(os.environ) == before[1], entry.failure)\n"
    )
    result = python(program, VERL_PLATFORM=platform)
    assert result.stdout == "['verl_fuse_cpu', 'verl_fuse_cpu.entry', 'verl_fuse_cpu.environment']\nTrue None\n"


def test_a_failure_is_printed_kept_and_leaves_no_platform():
    program = (
        "import sys; sys.modules['verl_fuse_cpu.platform'] = None\n"
        "import verl_fuse_cpu.entry as entry\n"
        "print(type(entry.failure).__name__)\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "print(PlatformRegistry.get('cpu'))\n"
    )
    result = python(program, VERL_PLATFORM="cpu")
    assert result.stdout.splitlines() == ["ModuleNotFoundError", "None"]
    assert "verl-fuse: the cpu platform is not available in process " in result.stderr
    assert "Traceback (most recent call last)" in result.stderr


def test_a_refused_patch_is_a_failure():
    program = (
        "import dataclasses, verl_fuse_patches.gloo_backend as module\n"
        "module.PATCH = dataclasses.replace(module.PATCH, fingerprints={'<0.1': ''})\n"
        "import verl_fuse_cpu.entry as entry\n"
        "print(entry.failure)\n"
    )
    result = python(program, VERL_PLATFORM="cpu")
    assert result.stdout.startswith("patch 'gloo_backend' of verl.utils.distributed:")
    assert "written for versions <0.1; found 0.9." in result.stdout
