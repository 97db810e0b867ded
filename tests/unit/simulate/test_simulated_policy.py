"""`verl-fuse simulate --policy`: a row of an author's policy, its faults, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from verl_fuse.cli.main import main

SOURCE = """
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.step import Migration

class Shortest:
    HOOK_API = 2

    @hookimpl
    def fuse_infer_next(self, view, lane):
        ranked = sorted(view.ready, key=lambda sample: sample.seq_len)
        return None if lane.queued else [sample.key for sample in ranked[:64]] or None

class Wrong(Shortest):
    @hookimpl
    def fuse_infer_next(self, view, lane):
        return ["nosuch"]

class Raises(Shortest):
    @hookimpl
    def fuse_migration(self, view):
        raise RuntimeError("no licence")

class Scales:
    HOOK_API = 2

    @hookimpl
    def fuse_assign(self, prompts, replicas, running):
        return {prompt.uid: 0 for prompt in prompts}

    @hookimpl
    def fuse_scale(self, prompts, replicas, most):
        return 1

class Nothing:
    HOOK_API = 2

    @hookimpl
    def fuse_metrics(self, timeline):
        return None

class Old:
    @hookimpl
    def fuse_migration(self, view):
        return None

class SetsUp(Shortest):
    @hookimpl
    def fuse_setup(self, trainer):
        trainer.use_everything()

class Configures(Shortest):
    @hookimpl
    def fuse_config(self):
        raise RuntimeError("no block")

class Leaves(Shortest):
    def __init__(self):
        raise SystemExit(3)
"""
WORKLOAD = {
    "algorithm": "grpo",
    "prompts": 128,
    "samples": 2,
    "prompt": "uniform:50-300",
    "response": "bimodal:short=150,long=1600,share=0.05,sigma=0.2,max=2048",
    "actor": "qwen2.5-7b",
    "reference": "qwen2.5-7b",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "acme_rows.py").write_text(SOURCE)
    (tmp_path / "acme_broken.py").write_text("import nosuchmodule\n")
    (tmp_path / "step.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.chdir(tmp_path)
    for name in ("acme_rows", "acme_broken"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "simulate",
                "step.yaml",
                "h100x2",
                "--seeds",
                "2",
                "--strategy",
                "interstage",
                "--strategy",
                "observe",
                *arguments,
            ]
        )
    return int(stop.value.code or 0)


def test_policies_have_rows_beside_the_features(capsys: pytest.CaptureFixture[str]):
    own = "verl_fuse_interstage.plugin:InterstagePlugin"
    policies = [f"acme_rows:{name}" for name in ("Shortest", "Scales")]
    assert run("--json", *(word for name in (*policies, own) for word in ("--policy", name))) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert list(rows) == ["stock", "interstage", "observe", *policies, own]
    seconds = {name: row["seconds"]["mean"] for name, row in rows.items()}
    assert seconds["acme_rows:Scales"] > seconds["observe"], "one replica has everything"
    (did,) = [note for note in rows["acme_rows:Shortest"]["notes"] if "replicas freed" in note]
    assert re.fullmatch(
        r"[1-9] of \d replicas freed, \d+ requests moved, [1-9]\d* micro-groups inferred meanwhile", did
    )
    assert seconds[own] == pytest.approx(seconds["interstage"], rel=0.06), "the strategy's plugin, asked at each look"
    assert [row["faults"] for row in rows.values()] == [[]] * 6
    assert "what it leaves open is decided by fuse.interstage on slices" in rows["acme_rows:Shortest"]["notes"]
    assert "fuse_scale: not asked by the simulator" in rows["acme_rows:Scales"]["notes"]
    assert not any("leaves open" in note for note in rows["acme_rows:Scales"]["notes"])


@pytest.mark.parametrize(("prompts", "cluster"), [(128, "h100"), (1024, "h100"), (512, "h100x4")])
def test_the_built_in_policy_gains_on_many_replicas_what_its_strategy_promises(
    folder: Path, capsys: pytest.CaptureFixture[str], prompts: int, cluster: str
):
    many = {"prompts": prompts, "response": "lognormal:median=300,sigma=0.7,max=1024", "actor": "qwen2.5-7b"}
    workload = {**many, "algorithm": "grpo", "samples": 8, "prompt": "fixed:128", "reference": "qwen2.5-7b"}
    (folder / "step.yaml").write_text(yaml.safe_dump(workload))
    own = "verl_fuse_interstage.plugin:InterstagePlugin"
    arguments = ["simulate", "step.yaml", cluster, "--set", "engine=fsdp", "--seeds", "1", "--strategy", "interstage"]
    with pytest.raises(SystemExit):
        main([*arguments, "--policy", own, "--json"])
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    gains = {name: rows["stock"]["seconds"]["mean"] / row["seconds"]["mean"] for name, row in rows.items()}
    assert gains["interstage"] > 1.03
    assert gains[own] > 1 + 0.7 * (gains["interstage"] - 1)


def test_faults_are_shown_and_the_row_is_the_rest(folder: Path, capsys: pytest.CaptureFixture[str]):
    names = ("Wrong", "Raises", "Shortest")
    assert run(*(word for name in names for word in ("--policy", f"acme_rows:{name}")), "--timeline", "out") == 0
    text = " ".join(re.sub(r"[│\n]", " ", capsys.readouterr().out).split())
    assert "acme_rows:Wrong: FAULTY in 2 steps, whose rest went on without it: fuse_infer_next returned" in text
    assert "['nosuch']; allowed: ready samples, each once" in text
    assert "acme_rows:Raises: FAULTY in 2 steps" in text
    assert "fuse_migration raised RuntimeError: no licence" in text
    assert text.count("(faulty)") == 2
    assert re.search(
        r"acme_rows:Wrong: steps are \d\.\d\d times as fast as observe's \[[\d., ]+\], "
        r"\d\.\d\d times as fast as \S+'s, although it is faulty",
        text,
    )
    assert re.search(
        r"acme_rows:Shortest: steps are \d\.\d\d times as fast as observe's \[[\d., ]+\], \d\.\d\d times", text
    )
    page = (folder / "out/strategies.html").read_text()
    assert 'href="acme_rows.Shortest/timeline/step_000001.html"' in page
    shown = page.partition("Below 1 %")[0]
    assert "acme_rows:Raises (faulty)" in shown
    assert "FAULTY in 2 steps, whose rest went on without it: fuse_migration raised RuntimeError: no licence" in page
    assert (folder / "out/acme_rows.Shortest/timeline/step_000001.html").is_file()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("acme_rows", "needs MODULE:CLASS, for instance acme_fuse:LongestFirst"),
        ("acme_row:Shortest", "there is no module 'acme_row'; run the command in its folder, or install its package"),
        ("acme_rows:Shortst", "acme_rows has no 'Shortst' (did you mean 'Shortest'?); classes there: Shortest, Wrong,"),
        ("acme_broken:X", "acme_broken cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'"),
        (
            "acme_rows:Nothing",
            "it has none of the hooks that a simulated rollout asks: fuse_assign, fuse_migration, fuse_infer_next; add "
            "one of them, marked with @hookimpl",
        ),
        ("acme_rows:Old", "declares HOOK_API=None; verl-fuse 0.1.0 offers 2: set HOOK_API = 2 in it"),
        ("acme_rows:Configures", "fuse_config failed: RuntimeError: no block"),
        ("acme_rows:Leaves", "it cannot be made: SystemExit: 3"),
        ("acme_rows:SetsUp", "fuse_setup failed: AttributeError: a trainer has no 'use_everything'"),
    ],
)
def test_what_cannot_decide_is_refused_in_one_sentence(policy: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert run("--policy", policy) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_recorded_run_takes_no_policy(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--from", "run", "--policy", "acme_rows:Shortest"])
    assert stop.value.code == 2
    assert "--from RUN_DIR takes everything from the run" in capsys.readouterr().err
