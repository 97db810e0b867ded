"""`verl-fuse schedule from-model`: problems from model sizes."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_fuse.cli.schedule import app
from verl_fuse.errors import FuseError
from verl_fuse.spec.problem import ScheduleProblem

ARGUMENTS = {
    "--actor": "llama-13b",
    "--critic": "llama-7b",
    "--actor-layout": "tp8 pp4",
    "--critic-layout": "tp8 pp2 dp2",
    "--microbatches": "16",
}


def from_model(out: Path, cluster: str = "h100x4", **changes: str):
    options = {**ARGUMENTS, **{f"--{key.replace('_', '-')}": value for key, value in changes.items()}}
    return CliRunner().invoke(app, ["from-model", cluster, "--out", str(out), *sum(options.items(), ())])


def test_the_problem_of_two_models(tmp_path: Path):
    out = tmp_path / "problem.json"
    result = from_model(out)
    assert result.exit_code == 0, result.output
    problem = ScheduleProblem.read(out)
    assert [(p.model, p.ranks, p.microbatches) for p in problem.pipelines] == [
        ("actor", (0, 1, 2, 3), 16),
        ("critic", (1, 0), 8),
        ("critic", (3, 2), 8),
    ]
    actor, critic = problem.pipelines[:2]
    assert all(back > forth for p in (actor, critic) for forth, back in zip(p.forward, p.backward, strict=True))
    # 10 blocks' inputs of 4 sequences of 1280 tokens in bf16, over 8 tensor ranks.
    assert actor.activation[0] == pytest.approx(10 * 2 * 4 * 1280 * 5120 / 8)
    assert critic.activation[0] == pytest.approx(16 * 2 * 4 * 1280 * 4096 / 8)
    assert problem.memory_limit is not None
    assert 10 * 2**30 < problem.memory_limit < 79.6 * 2**30


def test_the_command_of_the_readme_runs(repo: Path, tmp_path: Path):
    line = re.search(r"^verl-fuse schedule (from-model .*)$", (repo / "verl_fuse/schedule/README.md").read_text(), re.M)
    assert line is not None
    words = [str(tmp_path / word) if word == "PROBLEM.json" else word for word in shlex.split(line[1])]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert ScheduleProblem.read(tmp_path / "PROBLEM.json").ranks == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": "llama-33b"}, "tp=8; needs a divisor of heads=52"),
        ({"critic_layout": "tp8 pp2"}, "actor tp8 pp4 has 32 devices, critic tp8 pp2 16; needs equal numbers"),
        ({"actor_layout": "tp4 pp4 dp2"}, "differ in tp or cp"),
        ({"cluster": "h100"}, "layout tp8 pp4 needs 32 devices; there are 8"),
        ({"actor": "llama-3.1-405b"}, r"H100 has 79.6 GiB; both models and one micro-batch need \d+.\d GiB"),
        ({"actor_layout": "tp8 pp"}, "needs degrees such as"),
    ],
)
def test_what_cannot_be_fused_is_refused(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(FuseError, match=message):
        raise from_model(tmp_path / "problem.json", **changes).exception
    assert not (tmp_path / "problem.json").exists()
