"""`verl-fuse advise RUN_DIR`."""

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import write_run

from verl_fuse.cli import advise
from verl_fuse.cli.composition import compose
from verl_fuse.cli.main import main
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cost.drafter import FIGURES
from verl_fuse.spec.run_config import save_config

pytest.importorskip("hydra")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three steps in observe mode on four replicas with a long tail."""
    write_run(tmp_path / "run", steps=3, replicas=4, requests=256)
    return tmp_path / "run"


def keep(run_dir: Path, recipe: str, *overrides: str) -> None:
    save_config(run_dir, compose(find_recipe(recipe), overrides))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["advise", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code or 0) == code, captured.err
    return captured.out if code == 0 else captured.err


def test_the_gain_of_each_feature_and_the_lines_to_paste(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    keep(run_dir, "ppo-gsm8k-8gpu", "fuse.interstage.enabled=false")
    shown = ask(capsys, run_dir, "--set", "dedicated=true")
    states = {
        line.split("│")[1].strip(): line.split("│")[5].strip() for line in shown.splitlines() if line.startswith("│")
    }
    assert states["interstage"] == "switch on"
    assert states["pipeline"] == "refused"
    assert states["streaming"] == "measure it"
    assert shown.splitlines()[-3:] == [
        "  fuse.interstage.enabled=true \\",
        "  fuse.interstage.layout=slices \\",
        "  fuse.interstage.migration_threshold=auto",
    ]
    monkeypatch.setattr(advise, "TRUSTED", -1.0)
    unsure = " ".join(ask(capsys, run_dir, "--set", "dedicated=true").split())
    assert "Verdict: not sure, the replay is that far off: measure with `verl-fuse ab`. It says: switch on" in unsure
    assert "paste" not in unsure
    lines = shown.splitlines()
    said = lines[lines.index("pipeline: refused: 2 problems:") :][1:]
    strategies = [line for line in said if line.startswith("  - ") and ".strategy='fsdp2'" in line]
    assert [line.partition("=")[0] for line in strategies] == [
        "  - actor_rollout_ref.actor.strategy",
        "  - critic.strategy",
    ]
    assert max(map(len, shown.splitlines())) <= 100


def test_where_the_devices_are_shared_no_gain_is_predicted(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Here the run itself would be refused; that is no feature's fault.
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    keep(run_dir, "ppo-cpu")
    found = json.loads(ask(capsys, run_dir, "--json"))
    (interstage,) = [gain for gain in found["gains"] if gain["feature"] == "interstage"]
    assert interstage["note"] == "no tail is moved: devices are shared and saturated"
    assert (found["features"], found["advised"]) == (
        [],
        {"seconds": found["step_seconds"], "speedup": 1.0, "at_most": False},
    )
    assert found["verdict"].startswith(
        "switch no feature on: none is predicted to gain 1% of a step; observe mode alone saves "
    )
    assert found["refused"]["pipeline"] != []
    assert found["refused"]["streaming"] == []
    assert not any("devices of their own" in note for note in found["notes"])


@pytest.mark.parametrize(("recipe", "told"), [("ppo-gsm8k-8gpu", True), ("ppo-cpu", False)])
def test_the_measured_cost_of_drafts_is_told_of_runs_on_accelerators(
    run_dir: Path, recipe: str, told: bool, capsys: pytest.CaptureFixture[str]
):
    keep(run_dir, recipe)
    found = json.loads(ask(capsys, run_dir, "--set", "acceptance=0.9", "--json"))
    (speculation,) = [gain for gain in found["gains"] if gain["feature"] == "speculation"]
    assert (FIGURES in speculation["note"]) is told
    keep(run_dir, recipe, "fuse.speculation.enabled=true")
    found = json.loads(ask(capsys, run_dir, "--json"))
    (speculation,) = [gain for gain in found["gains"] if gain["feature"] == "speculation"]
    assert speculation["note"].startswith("it was on")
    assert (FIGURES in speculation["note"]) is told


def test_a_feature_that_is_on_is_not_advised(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    keep(run_dir, "ppo-cpu", "fuse.elastic.enabled=true", "fuse.elastic.scale=true", "fuse.elastic.release=true")
    found = json.loads(ask(capsys, run_dir, "--json"))
    assert found["on"] == ["routing", "scaling"]
    assert "scaling" not in found["features"]
    on = ("enabled=true", "layout=slices", "migration_threshold=auto")
    keep(run_dir, "ppo-gsm8k-8gpu", *(f"fuse.interstage.{override}" for override in on))
    found = json.loads(ask(capsys, run_dir, "--set", "dedicated=true", "--json"))
    (interstage,) = [gain for gain in found["gains"] if gain["feature"] == "interstage"]
    assert interstage["seconds"] > 0
    assert ("interstage" in found["on"], "interstage" in found["features"]) == (True, False)


CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def with_model(run_dir: Path, *overrides: str) -> None:
    """The run's model is here, and a rank's mini-batch of some 3000 tokens is cut in two."""
    (run_dir / "config.json").write_text(json.dumps(CONFIG))
    keep(run_dir, "grpo-fsdp2-8gpu", f"actor_rollout_ref.model.path={run_dir}", f"{BUDGET}=2560", *overrides)


def test_verl_s_own_settings_are_named_with_what_they_cost(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with_model(run_dir)
    found = json.loads(ask(capsys, run_dir, "--json"))
    settings = {each["key"]: each for each in found["settings"]}
    budget = settings[BUDGET]
    # The smallest of all budgets that hold the mini-batch.
    assert (budget["current"], budget["overrides"], budget["expected"]) == (2560, [f"{BUDGET}=5120"], "faster")
    assert (budget["rounds"], budget["cuts_mini_batches"], budget["ends_resume"]) == (True, False, False)
    # The reference's budget follows.
    assert budget["micro_batches"] == [4.0, 2.0]
    assert (budget["seconds"], budget["more_bytes"], found["peak_bytes"]) == (None, None, None)
    shards = settings["actor_rollout_ref.actor.fsdp_config.fsdp_size"]
    assert (shards["ends_resume"], shards["expected"], shards["micro_batches"]) == (True, "unknown", None)
    assert settings["actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"]["expected"] in ("as before", "slower")
    shown = ask(capsys, run_dir)
    assert f"\n  {BUDGET}=5120\n    now 2560; each micro-batch reads all weights anew" in shown
    assert "4 micro-batches of a rank in a step become 2; seconds not predicted" in " ".join(shown.split())
    assert "Try them: verl-fuse tune --keys KEY -- ARGUMENTS" in shown


def test_packing_is_advised_with_budgets_that_hold_the_longest_sequence(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    packed = "actor_rollout_ref.actor.use_dynamic_bsz"
    rows = [f"{packed}=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]
    passes = ("actor_rollout_ref.rollout.log_prob", "actor_rollout_ref.ref.log_prob")
    rows += [f"{each}_{name}" for each in passes for name in ("use_dynamic_bsz=false", "micro_batch_size_per_gpu=4")]
    other = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    budgets = [f"{BUDGET}=16384", f"{other}=16384", "data.max_prompt_length=2048", "data.max_response_length=20480"]
    with_model(run_dir, *rows, *budgets)
    settings = {each["key"]: each for each in json.loads(ask(capsys, run_dir, "--json"))["settings"]}
    assert {f"{packed}=true", f"{BUDGET}=22528", f"{other}=22528"} <= {*settings[packed]["overrides"]}


def test_seconds_of_verl_s_settings_need_the_run_s_devices(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with_model(run_dir)
    step = {"timing_s/step": 5.0, "actor/perf/max_memory_reserved_gb": 41.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 2, "data": step}) + "\n")
    found = json.loads(ask(capsys, run_dir, "--cluster", "h100", "--json"))
    (budget,) = [each for each in found["settings"] if each["key"] == BUDGET]
    # Of the update's half second.
    assert 0 < budget["seconds"] < 0.5
    assert budget["more_bytes"] > 0
    assert found["peak_bytes"] == 41 * 2**30
    shown = " ".join(ask(capsys, run_dir, "--cluster", "h100").split())
    assert f"{budget['seconds']:.2f} s a step less predicted" in shown
    assert "GiB more predicted beside the measured peak of 41.0" in shown
    assert "has 16 devices, the run 8: name the run's" in ask(capsys, run_dir, "--cluster", "h100x2", code=2)
    assert "--profile p.json: needs --cluster" in ask(capsys, run_dir, "--profile", "p.json", code=2)
    (run_dir / "config.json").unlink()
    assert "predictions need the model" in ask(capsys, run_dir, "--cluster", "h100", code=2)


def test_nothing_is_predicted_of_verl_s_settings_in_a_run_with_features(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    with_model(run_dir, "fuse.elastic.enabled=true")
    found = json.loads(ask(capsys, run_dir, "--cluster", "h100", "--json"))
    assert {each["micro_batches"] for each in found["settings"]} == {None}
    assert "nothing is predicted of verl's settings in a run with features (routing)" in found["notes"]


def test_features_of_plugins_that_the_run_disabled_are_not_advised(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    keep(run_dir, "ppo-gsm8k-8gpu", "fuse.disabled_plugins=[update]")
    found = json.loads(ask(capsys, run_dir, "--json"))
    assert "old_log_prob" not in found["refused"]
    assert {"interstage", "scaling"} <= found["refused"].keys()


def test_without_a_configuration_what_was_not_checked_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(ask(capsys, run_dir, "--json"))
    assert found["features"] == ["interstage", "old_log_prob"]
    assert set(map(tuple, found["refused"].values())) == {()}
    assert (
        found["notes"][0]
        == "the run's configuration was not kept (config.yaml): what refuses a feature is not checked, "
        "a feature that leaves no trace may have been on, and no setting of verl's is named, with --cluster neither"
    )


def test_a_replay_that_misses_the_run_is_not_to_be_believed(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    for path in (run_dir / "timeline").glob("step_*.json"):
        step = json.loads(path.read_text())
        for span in step["spans"]:
            if span[2] == "generate":
                span[4] = span[3] + (span[4] - span[3]) * float(rng.lognormal(0, 1.5))
        step["end"] = max(span[4] for span in step["spans"])
        path.write_text(json.dumps(step))
    found = json.loads(ask(capsys, run_dir, "--json"))
    assert found["replay_error"] > 0.2
    assert "the figures say little" in found["notes"][0]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "no recorded step under timeline/"),
        (lambda run: run.rmdir(), "no such directory; needs the directory of a run"),
    ],
)
def test_a_folder_that_is_no_recorded_run_is_refused_in_one_line(
    tmp_path: Path, prepare, message: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bad").mkdir()
    prepare(tmp_path / "bad")
    shown = ask(capsys, tmp_path / "bad", code=2)
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_configuration_that_cannot_be_read_is_refused_in_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / "config.yaml").write_text("[")
    shown = ask(capsys, run_dir, code=2)
    assert "config.yaml: not a configuration" in shown
    assert len(shown.strip().splitlines()) == 1
