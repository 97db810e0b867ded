"""`verl-fuse profile` from the command line."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import table
from typer.testing import CliRunner

from verl_fuse.cli.group import build
from verl_fuse.cli.main import GROUPS
from verl_fuse.cli.profile import notes_of, print_errors, print_measured, read_run, with_floors
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.floors import StageError
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.files import record_step

app = build(GROUPS)

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
}
VERL = """
trainer: {nnodes: 1, n_gpus_per_node: 2}
data: {train_batch_size: 2}
actor_rollout_ref:
  rollout: {log_prob_micro_batch_size_per_gpu: 1, tensor_model_parallel_size: 1, n: 1}
  ref: {log_prob_micro_batch_size_per_gpu: 1}
  actor: {ppo_mini_batch_size: 2, ppo_micro_batch_size_per_gpu: 1}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "hydra" / ".hydra").mkdir(parents=True)
    (run / "hydra" / ".hydra" / "config.yaml").write_text(VERL)
    for step in (1, 2):
        spans = [Span(name, "step", "stage", i, i + 1) for i, name in enumerate(("gen", "ref", "update_actor"))]
        request = {"prompt_tokens": 4, "response_tokens": 9}
        spans += [Span("request", f"replica {i}", "generate", 0, 1, request) for i in range(2)]
        record_step(run, Timeline("run", step, 0, 3, tuple(spans)), html=False, perfetto=False)
    return run


def profile(*arguments: object):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_a_profile_is_written_and_read(
    tmp_path: Path, model: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], documented_keys: dict[str, set[str]]
):
    pytest.importorskip("torch")
    out = tmp_path / "profile.json"
    grid = ("--batches", "2,1", "--lengths", "4,8", "--tp", "1,2")
    result = profile("--model", model, "--out", out, *grid, "--from", run_dir, "--json")
    assert result.exit_code == 0, result.output
    table = ProfileTable.read(out)
    data = json.loads(result.stdout)
    assert set(data) == documented_keys["profile"]
    assert (data["file"], data["profile"]) == (str(out), json.loads(table.to_json()))
    print_measured(table.models[1])
    assert "tiny, tp 2: milliseconds" in capsys.readouterr().out
    assert [(found.model.name, found.tp) for found in table.models] == [("tiny", 1), ("tiny", 2)]
    assert table.models[0].measurements[0].batches == (1, 2)
    assert table.engine is not None
    assert table.engine.call > 0
    assert table.sources == ("run",)
    assert [(each["stage"], each["measured"]) for each in data["runs"]["run"]] == [
        ("gen", 1.0),
        ("ref", 1.0),
        ("update_actor", 1.0),
    ]
    assert len(data["notes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batches", "0"), "--batches=0: needs whole numbers"),
        (("--batches", "1,65537"), "--batches=65537: needs at most 65536"),
        (("--lengths", "a,b"), "--lengths=a,b: needs whole numbers"),
        (("--precision", "int4"), "precision 'int4'"),
        (("--model", "llama-9b"), "model 'llama-9b': unknown"),
        (("--from", "nowhere"), "nowhere: no such directory"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, model: Path, arguments: tuple, message: str):
    pytest.importorskip("torch")
    result = profile("--model", model, "--out", tmp_path / "profile.json", *arguments)
    assert isinstance(result.exception, FuseError)
    assert message in str(result.exception)
    assert not (tmp_path / "profile.json").exists()


def test_ranks_beside_the_one_compute_while_it_is_measured_and_end(tmp_path: Path, model: Path, monkeypatch):
    torch = pytest.importorskip("torch")
    found = []
    started = subprocess.Popen

    def popen(*arguments, **options):
        found.append(started(*arguments, **options))
        return found[-1]

    def measured(*_):
        assert [process.poll() for process in found] == [None, None]
        raise FuseError("enough")

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("verl_fuse.runtime.profile.measure_model", measured)
    command = ["profile", "--model", str(model), "--out", str(tmp_path / "p.json"), "--beside", "2"]
    assert str(CliRunner().invoke(app, command).exception) == "enough"
    assert all(process.returncode is not None for process in found)
    found.clear()
    monkeypatch.setattr(
        "verl_fuse.runtime.profile.BenchSettings.on", lambda *_: SimpleNamespace(device=torch.device("meta"))
    )
    refused = CliRunner().invoke(app, [*command, "--device", "meta"]).exception
    assert str(refused) == "--beside 2: needs --device cpu; ranks have accelerators of their own"
    assert found == []


def test_a_busy_process_ends_with_the_one_that_started_it():
    pytest.importorskip("torch")
    program = "import os, sys\nfrom verl_fuse.runtime.profile import busy\n"
    program += "import subprocess\nstarted = subprocess.Popen\n"
    program += "def popen(*a, **b):\n    found = started(*a, **b)\n    print(found.pid, flush=True)\n    return found\n"
    program += "subprocess.Popen = popen\nwith busy(1, 1):\n    os._exit(0)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        # Nobody may have asked for its exit code.
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} goes on")


def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, model: Path, monkeypatch):
    monkeypatch.setattr("verl_fuse.cli.profile._measuring", lambda threads: pytest.fail("measured first"))
    result = profile("--model", model, "--out", tmp_path / "nodir" / "x.json")
    assert isinstance(result.exception, FuseError)
    assert "nodir/x.json: cannot be written" in str(result.exception)


def test_a_run_without_its_configuration_is_refused(run_dir: Path):
    (run_dir / "hydra" / ".hydra" / "config.yaml").unlink()
    with pytest.raises(FuseError, match="the run's configuration gives its micro-batch sizes"):
        read_run(run_dir)


def test_a_run_is_read_from_its_own_configuration_and_log(run_dir: Path):
    (run_dir / "config.yaml").write_text(VERL.replace("n_gpus_per_node: 2", "n_gpus_per_node: 3"))
    assert (read_run(run_dir).ranks, len(read_run(run_dir).steps)) == (3, 1)
    lengths = {f"{name}_length/{fact}": 9 for name in ("prompt", "response") for fact in ("mean", "max")}
    lines = [
        {"step": step, "data": {"timing_s/step": 4, "timing_s/gen": 2, "timing_s/update_actor": 1, **lengths}}
        for step in (1, 2, 3)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_run(run_dir).steps) == 1, "the timelines'"
    shutil.rmtree(run_dir / "timeline")
    found = read_run(run_dir)
    assert [step.stages for step in found.steps] == [{"gen": 2.0, "update_actor": 1.0}] * 2


def test_what_a_reader_of_floors_must_know_is_noted(run_dir: Path):
    run = read_run(run_dir)
    assert [note[:34] for note in notes_of([run])] == ["the floors are read off one step, "]
    assert notes_of([run, run]) == []
    trained = dataclasses.replace(run, steps=tuple(dataclasses.replace(s, stages={"gen": 1.0}) for s in run.steps) * 2)
    (note,) = notes_of([trained])
    assert note.startswith("no step has a pass for log-probs or values on all workers")
    assert notes_of([]) == []


def test_the_stage_that_is_furthest_off_is_named(capsys: pytest.CaptureFixture[str]):
    print_errors("run", [StageError("gen", 58.0, 39.0, 3.0), StageError("update_actor", 20.0, 21.0, 0.5)])
    shown = capsys.readouterr().out
    assert "measured 78.00 s, predicted 60.00 s in these stages; furthest off is gen, 58.00 s against 39.00 s" in (
        " ".join(shown.split())
    )
    assert "1.49" in shown


def test_floors_are_read_off_a_node_that_has_room_for_the_largest_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    fitted: list[AnalyticCost] = []
    monkeypatch.setattr("verl_fuse.cli.profile.fit_floors", lambda _runs, _model, cost: fitted.append(cost))
    small = read_run(run_dir)
    found = with_floors(table(), [small, dataclasses.replace(small, ranks=5), dataclasses.replace(small, ranks=3)])
    assert found.sources == ("run",) * 3
    assert [(cost.cluster.nodes, cost.cluster.devices_per_node) for cost in fitted] == [(1, 5)]
