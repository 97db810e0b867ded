"""The plugin that `verl-fuse example plugin` writes, installed in a stranger's way."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_fuse.cli.example import write_plugin

PROBE = """
import json
from omegaconf import OmegaConf
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.testing import SetUpTrainer, lane, samples, view

others = ["interstage", "elastic", "pipeline", "placement", "realloc", "speculation", "update", "observe", "cpu"]
block = {"disabled_plugins": others, "acme": {"largest_micro_group": 5}}
settings = load_settings(OmegaConf.create({"fuse": block}))
hook = settings.manager.hook
hook.fuse_setup(trainer=SetUpTrainer(blocks=settings.blocks))
seen = view(samples([3, 9, 1, 7, 5, 8]))
spans = tuple(Span("generate", "replica 0", "generate", 0.0, float(end)) for end in (2, 5))
print(json.dumps({
    "plugins": [name for name, _ in settings.manager.list_name_plugin()],
    "idle": hook.fuse_infer_next(view=seen, lane=lane(multiple=2)),
    "busy": hook.fuse_infer_next(view=seen, lane=lane(queued=1, multiple=2)),
    "metrics": hook.fuse_metrics(timeline=Timeline("run", 1, 0.0, 6.0, spans)),
}))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that `verl-fuse example plugin` writes."""
    folder = tmp_path_factory.mktemp("author") / "acme-fuse"
    write_plugin(folder)
    return folder


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    """A folder into which pip installed it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    target = project.with_name("site")
    subprocess.run([*pip, "--target", str(target), str(project)], check=True)
    return target


def test_the_guide_prints_its_files(repo: Path, project: Path):
    readme = (repo / "plugins/README.md").read_text()
    files = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL))
    assert files == {name: (project / name).read_text() for name in ("pyproject.toml", "acme_fuse.py")}


def test_its_own_tests_pass_where_it_is_installed(project: Path, site: Path, tmp_path: Path):
    shutil.copytree(project / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "4 passed" in shown.stdout
    (site / "acme_fuse.py").rename(site / "acme_fuse.away")
    broken = (site / "acme_fuse.away").read_text().replace("reverse=True", "reverse=False")
    (tmp_path / "acme_fuse.py").write_text(broken)
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    (site / "acme_fuse.away").rename(site / "acme_fuse.py")
    assert shown.returncode == 1, "they notice a policy that is wrong"
    assert "1 failed, 3 passed" in shown.stdout


def run_probe(site: Path, code: str) -> object:
    """Return the JSON that `code` prints in a process that has `site` installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(shown.stdout)


def test_the_documented_plugin_installs_and_works(site: Path):
    assert run_probe(site, PROBE) == {
        "plugins": ["acme"],
        "idle": ["g1_0_0", "g5_0_0", "g3_0_0", "g4_0_0"],
        "busy": None,
        "metrics": [{"acme/longest_generation_seconds": 5.0}],
    }


def test_the_documented_plugin_is_registered_after_the_builtin_ones(site: Path):
    probe = "import json; from verl_fuse import plugins; print(json.dumps([s.name for s in plugins.discover()]))"
    assert run_probe(site, probe) == [
        "interstage",
        "elastic",
        "pipeline",
        "placement",
        "realloc",
        "speculation",
        "update",
        "observe",
        "cpu",
        "acme",
    ]
