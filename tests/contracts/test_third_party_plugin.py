"""The plugin printed in plugins/README.md, installed as a stranger would install it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json
from verl_fuse import plugins
from verl_fuse.spec.step import LaneView, RolloutView, Sample
from verl_fuse.spec.timeline import Span, Timeline

samples = tuple(Sample(key=f"s{n}", group="g", prompt_len=4, response_len=n) for n in (3, 9, 1, 7, 5))
view = RolloutView(step=1, elapsed=2.0, expected=8, finished=5, groups=2, groups_finished=0, ready=samples, lanes=())
lane = LaneView(name="train", stages=("ref",), queued=0, multiple=2)
spans = tuple(Span("generate", "replica 0", "generate", 0.0, float(end)) for end in (2, 5))
manager = plugins.load()
print(json.dumps({
    "plugins": [name for name, _ in manager.list_name_plugin()],
    "next": manager.hook.fuse_infer_next(view=view, lane=lane),
    "metrics": manager.hook.fuse_metrics(timeline=Timeline("run", 1, 0.0, 6.0, spans)),
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


def test_the_documented_plugin_installs_and_works(site: Path):
    probe = [sys.executable, "-c", PROBE]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    result = json.loads(subprocess.run(probe, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert result["plugins"][-1] == "acme"
    assert result["next"] == ["s9", "s7", "s5", "s3"]
    assert {"acme/longest_generation_seconds": 5.0} in result["metrics"]
