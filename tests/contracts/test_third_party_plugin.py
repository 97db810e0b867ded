"""The plugin printed in plugins/README.md, installed in a stranger's way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, types
from omegaconf import OmegaConf
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.step import LaneView, RolloutView, Sample
from verl_fuse.spec.timeline import Span, Timeline

others = ["interstage", "elastic", "pipeline", "placement", "realloc", "speculation", "update", "observe", "cpu"]
block = {"disabled_plugins": others, "acme": {"largest_micro_group": 5}}
settings = load_settings(OmegaConf.create({"fuse": block}))
hook = settings.manager.hook
hook.fuse_setup(trainer=types.SimpleNamespace(block=settings.blocks.get))
samples = tuple(Sample(key=f"s{n}", group="g", prompt_len=4, response_len=n) for n in (3, 9, 1, 7, 5, 8))
view = RolloutView(step=1, elapsed=2.0, expected=8, finished=6, groups=2, groups_finished=0, ready=samples, lanes=())
spans = tuple(Span("generate", "replica 0", "generate", 0.0, float(end)) for end in (2, 5))
print(json.dumps({
    "plugins": [name for name, _ in settings.manager.list_name_plugin()],
    "idle": hook.fuse_infer_next(view=view, lane=LaneView(name="train", stages=("ref",), queued=0, multiple=2)),
    "busy": hook.fuse_infer_next(view=view, lane=LaneView(name="train", stages=("ref",), queued=1, multiple=2)),
    "metrics": hook.fuse_metrics(timeline=Timeline("run", 1, 0.0, 6.0, spans)),
}))
"""


@pytest.fixture
def site(repo: Path, tmp_path: Path) -> Path:
    """A folder into which pip installed the README's plugin."""
    readme = (repo / "plugins/README.md").read_text()
    files = re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "acme_fuse.py"]
    project = tmp_path / "acme"
    project.mkdir()
    for name, text in files:
        (project / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(project)], check=True)
    return tmp_path / "site"


def run_probe(site: Path, code: str) -> object:
    """Return the JSON that `code` prints in a process that has `site` installed."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(shown.stdout)


def test_the_documented_plugin_installs_and_works(site: Path):
    assert run_probe(site, PROBE) == {
        "plugins": ["acme"],
        "idle": ["s9", "s8", "s7", "s5"],
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
