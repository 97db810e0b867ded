"""Predictions of `verl-fuse tune` from a recorded trial and a profile of this machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig
from synthetic_run import write_run

from verl_fuse.cli import foreseen
from verl_fuse.cli.composition import compose
from verl_fuse.cli.foreseen import _without_recording, predictor
from verl_fuse.cli.profile import read_run
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.spec.run_config import save_config
from verl_fuse.tune.trial import Outcome, Trial

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


def config_of(trial: Path, *changes: str, model: dict | None = None) -> DictConfig:
    given = [f"{SIZE}=1", f"{SEQS}=4", f"actor_rollout_ref.model.path={trial.parent}", *changes]
    (trial.parent / "config.json").write_text(json.dumps(MODEL if model is None else model))
    config = compose(find_recipe("grpo-cpu"), given)
    save_config(trial, config)
    return config


def test_micro_batches_and_requests_are_predicted_and_other_settings_are_not(trial: Path, capsys):
    config = config_of(trial)
    ratio = predictor(config, trial, 0.0, 60.0, list).ratio
    assert capsys.readouterr().err == ""
    assert (trial.parent / "profile.json").is_file()
    larger, most, both = (f"{SIZE}=16",), (f"{SEQS}=32",), (f"{SIZE}=16", f"{SEQS}=32")
    assert ratio((), (), False) == 1.0
    assert 0 < ratio((), both, False) < ratio((), larger, False) < 1
    assert ratio((), most, False) < 1
    assert ratio(most, both, False) == pytest.approx(ratio((), both, False) / ratio((), most, False))
    assert ratio(larger, (), False) == pytest.approx(1 / ratio((), larger, False))
    # A replay generates nothing, so that a saving of the rest is a larger part of it.
    assert ratio((), larger, True) < ratio((), larger, False)
    assert isinstance(ratio((), PACKED, False), float)
    unknown = (f"{ROLLOUT}.enable_prefix_caching=false",)
    assert ratio((), unknown, False) is None
    # What was kept before is beside both.
    assert ratio(unknown, (*unknown, *larger), False) == ratio((), larger, False)


PASSES = (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu")


def sized(size: int) -> tuple[str, ...]:
    return tuple(f"{key}={size}" for key in (SIZE, *PASSES))


def replay(folder: Path, size: int, seconds: float) -> tuple[Path, Trial]:
    """A trial that replayed the base's steps with micro-batches of `size` rows, with its folder."""
    folder.mkdir()
    save_config(folder, compose(find_recipe("grpo-cpu"), [*sized(size), f"{SEQS}=4"]))
    lengths = {f"{name}_length/{fact}": 64 for name in ("prompt", "response") for fact in ("mean", "max")}
    stages = {"gen": 0.2, **dict.fromkeys(("old_log_prob", "ref", "update_actor"), seconds)}
    logged = lengths | {f"timing_s/{stage}": taken for stage, taken in {**stages, "step": 3 * seconds + 0.2}.items()}
    lines = [json.dumps({"step": step, "data": logged}) + "\n" for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder, Trial(sized(size), Outcome("measured", (3 * seconds + 0.2,) * 2), 60.0, replayed=True)


def test_a_measured_trial_corrects_what_is_predicted_of_others(trial: Path):
    """Each of a rank's micro-batches takes 0.625 s, 20 s in the base, of one row each, and a call itself nothing.
    Beside these the model's seconds are few."""
    write_run(trial, steps=3, replicas=2, requests=64, stage=20.0)
    later: list[tuple[Path, Trial]] = []
    ratio = predictor(config_of(trial, *sized(1)), trial, 0.0, 60.0, lambda: later).ratio
    seconds = {size: 32 / size * 0.625 for size in (4, 8)}

    def errors() -> list[float]:
        return [abs(ratio((), sized(size), True) / (seconds[size] / 20) - 1) for size in seconds]

    before = errors()
    later.append(replay(trial.parent / "trial-02", 16, 1.25))
    assert max(errors()) < 0.15 < min(before)
    known = ratio((), sized(8), True)
    # Of another setting's trial nothing is read, and one that cannot be read is left out.
    later.append((trial.parent / "nowhere", later[0][1]))
    later.append((trial.parent / "trial-02", replace(later[0][1], overrides=(f"{ACTOR}.use_torch_compile=false",))))
    assert ratio((), sized(8), True) == known


def test_a_search_goes_on_where_predicting_fails_and_says_so_once(trial: Path, monkeypatch, capsys):
    found = predictor(config_of(trial), trial, 0.0, 60.0, list)
    assert found.more_at_limits((f"{SIZE}=16",)) > found.more_at_limits(())

    def fails(*given: object) -> None:
        raise MemoryError("so")

    monkeypatch.setattr(foreseen, "effect", fails)
    assert [found.ratio((), (f"{SIZE}={size}",), False) for size in (2, 4)] == [None, None]
    assert found.more_at_limits(()) is None
    assert capsys.readouterr().err.count("nothing is predicted of further trials: MemoryError: so") == 1


def test_recording_belongs_to_the_generation_of_each_step(trial: Path):
    config_of(trial)
    run = read_run(trial)
    first, *others = (step.stages["gen"] for step in run.steps)
    without = _without_recording(run, first / 2)
    assert [step.stages["gen"] for step in without.steps] == [first / 2, *(taken - first / 2 for taken in others)]
    # A stage takes some time whatever is said of it.
    assert min(step.stages["gen"] for step in _without_recording(run, 1e9).steps) > 0
    others = [{name: taken for name, taken in step.stages.items() if name != "gen"} for step in run.steps]
    assert [{name: taken for name, taken in step.stages.items() if name != "gen"} for step in without.steps] == others


@pytest.mark.parametrize(
    ("changes", "model", "limit", "why"),
    [
        (("trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=2"), None, 60, "need 1, a data-para"),
        (("actor_rollout_ref.model.lora_rank=8",), None, 60, "lora_rank=8: not of runs with adapters"),
        ((f"{ACTOR}.strategy=veomni",), None, 60, "strategy=veomni: needs fsdp or fsdp2"),
        ((), {"model_type": "qwen2"}, 60, "predictions need the model"),
        ((f"{ROLLOUT}.dtype=float8",), None, 60, "precision 'float8'"),
        ((), None, 0.1, "was not done after 0 s"),
    ],
)
def test_a_run_of_which_nothing_is_known_is_searched_without(trial: Path, changes, model, limit, why: str, capsys):
    found = predictor(config_of(trial, *changes, model=model), trial, 0.0, limit, list)
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("verl-fuse: nothing is predicted of trials: ")
    assert why in said
    assert found.ratio((), (f"{SIZE}=16",), False) is None
    assert found.more_at_limits(()) is None
