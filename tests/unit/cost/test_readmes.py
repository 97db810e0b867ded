"""READMEs of cost and spec: their commands run, their files load, the modules they name exist."""

import re
import shlex
from pathlib import Path

import pytest
from test_profile_command import model, run_dir  # noqa: F401 - fixtures
from typer.testing import CliRunner

from verl_fuse.cli.group import build
from verl_fuse.cli.main import GROUPS
from verl_fuse.cost.table import ProfileTable
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.workload import Workload

app = build(GROUPS)


def test_commands_of_cost_run(repo: Path, tmp_path: Path, model: Path, run_dir: Path):  # noqa: F811 - fixtures
    pytest.importorskip("torch")
    text = (repo / "verl_fuse/cost/README.md").read_text()
    commands = re.findall(r"^verl-fuse (.*)$", text, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["profile", "profile", "simulate"]
    workload = tmp_path / "workload.yaml"
    workload.write_text(
        "{algorithm: grpo, prompts: 8, samples: 2, prompt: 'fixed:8', response: 'fixed:8', actor: qwen2.5-0.5b}"
    )
    small = {"profile": ["--batches", "1", "--lengths", "4"], "simulate": ["--strategy", "observe", "--seeds", "1"]}
    profile = tmp_path / "profile.json"
    words = {"MODEL_DIR": model, "RUN_DIR": run_dir, "profile.json": profile, "WORKLOAD.yaml": workload}
    for command in commands:
        arguments = [str(words.get(word, word)) for word in shlex.split(command)]
        result = CliRunner().invoke(app, [*arguments, *small[arguments[0]]])
        assert result.exit_code == 0, result.output
    assert ProfileTable.read(profile).engine is not None


def test_modules_named_in_cost_exist_and_all_are_named(repo: Path):
    folder = repo / "verl_fuse/cost"
    rows = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+\.py)`", row)}
    assert named == {path.name for path in folder.glob("*.py")} - {"__init__.py", "model.py"}


def test_files_and_forms_of_spec_load(repo: Path, tmp_path: Path):
    text = (repo / "verl_fuse/spec/README.md").read_text()
    cluster, workload = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    for name, content, read in (("cluster.yaml", cluster, Cluster.read), ("workload.yaml", workload, Workload.read)):
        (tmp_path / name).write_text(content)
        read(tmp_path / name)
    forms = re.findall(r"`((?:fixed|uniform|lognormal|bimodal):[^`]+)`", text)
    assert [str(LengthDistribution.parse(form)) for form in forms] == forms
    assert len(forms) == 4
