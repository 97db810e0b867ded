"""Predictions of `verl-fuse tune` from a recorded trial and a profile of this machine."""

import json
from pathlib import Path

import pytest
from synthetic_run import write_run

from verl_fuse.cli import foreseen
from verl_fuse.cli.composition import compose
from verl_fuse.cli.foreseen import predictor
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.tuned import base_of_recipe
from verl_fuse.spec.run_config import save_config

pytest.importorskip("hydra")
pytest.importorskip("torch")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZE, SEQS = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.max_num_seqs"
PACKED = (f"{ACTOR}.use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true")
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first trial of grpo-cpu with micro-batches of one row, four requests at a time, two steps after warm-up."""
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    monkeypatch.setattr(foreseen, "_GRID", ("--batches", "1,8", "--lengths", "16,64"))
    write_run(tmp_path / "trial-01", steps=3, replicas=2, requests=64)
    return tmp_path / "trial-01"


def base_of(trial: Path, *changes: str, model: dict | None = None):
    given = [f"{SIZE}=1", f"{SEQS}=4", f"actor_rollout_ref.model.path={trial.parent}", *changes]
    (trial.parent / "config.json").write_text(json.dumps(MODEL if model is None else model))
    recipe = find_recipe("grpo-cpu")
    save_config(trial, compose(recipe, given))
    return base_of_recipe(recipe, given)


def test_micro_batches_and_requests_are_predicted_and_other_settings_are_not(trial: Path, capsys):
    saves = predictor(base_of(trial), trial.parent, trial)
    assert capsys.readouterr().err == ""
    assert (trial.parent / "profile.json").is_file()
    larger, most = (f"{SIZE}=16",), (f"{SEQS}=32",)
    assert saves((), larger) > 0
    assert saves((), most) > 0
    assert saves((), (*larger, *most)) == pytest.approx(saves((), larger) + saves((), most))
    assert saves(most, (*larger, *most)) == pytest.approx(saves((), larger))
    assert saves(larger, ()) == -saves((), larger)
    assert isinstance(saves((), PACKED), float)
    unknown = (f"{ROLLOUT}.enable_prefix_caching=false",)
    assert saves((), unknown) is None
    # What was kept before matters to nothing that comes beside it.
    assert saves(unknown, (*unknown, *larger)) == saves((), larger)


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        (("trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=2"), None, "need 1, a data-parallel"),
        ((), {"model_type": "qwen2"}, "predictions need the model"),
        ((f"{ROLLOUT}.dtype=float8",), None, "precision 'float8'"),
    ],
)
def test_a_run_of_which_nothing_is_known_is_searched_without(trial: Path, changes, model, why: str, capsys):
    saves = predictor(base_of(trial, *changes, model=model), trial.parent, trial)
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("verl-fuse: nothing is predicted of trials: ")
    assert why in said
    assert saves((), (f"{SIZE}=16",)) is None
