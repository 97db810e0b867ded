"""`verl-fuse tune`: what it refuses, prints and returns, with functions in place of runs."""

import fcntl
import itertools
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from verl_fuse.cli import trials, tune
from verl_fuse.cli.foreseen import NOTHING, Foreseen
from verl_fuse.cli.main import main
from verl_fuse.tune.search import Search
from verl_fuse.tune.trial import Outcome, Trial

pytest.importorskip("hydra")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SEQS, SIZE = f"{ROLLOUT}.max_num_seqs", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
# Steps that take 2 s, and 1 s with all requests at once.
SLOW, FAST = Outcome("measured", (2.0, 2.02, 1.98)), Outcome("measured", (1.0, 0.98, 1.02), peak_bytes=2**30)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command with `trial` (overrides of the base -> Outcome) in place of runs: exit code, stdout, stderr."""

    def tuned(trial, *arguments: str, name: str = "grpo-cpu") -> tuple[int, str, str]:
        def made(base, home, number, asked) -> Outcome:
            return trial(tuple(asked.overrides))

        monkeypatch.setattr(trials, "made", made)
        monkeypatch.setattr(trials, "make_task", lambda launch: None)
        with pytest.raises(SystemExit) as end:
            main(["tune", name, *arguments])
        return end.value.code, *capsys.readouterr()

    return tuned


def never(overrides: tuple[str, ...]) -> Outcome:
    pytest.fail(f"{overrides} was started")


def by_requests(overrides: tuple[str, ...]) -> Outcome:
    if f"{SEQS}=32" in overrides:
        return FAST
    return Outcome("out_of_memory", reason="CUDA out of memory") if f"{SEQS}=16" in overrides else SLOW


BASE = (f"{SEQS}=8", "--keys", SEQS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "1.9"), "--budget 1.9: needs 2 minutes at least"),
        (("--budget", "inf"), "--budget inf: needs 2 minutes at least"),
        (("--keys", f"{ROLLOUT}.max_num_seq"), f"there is no such key (did you mean '{SEQS}'?)"),
        (("--keys", "algorithm.gamma"), "--keys algorithm.gamma: the loss"),
        (("--keys", f"{ACTOR}.strategy"), f"--keys {ACTOR}.strategy: needs --allow ends_resume"),
        (("--allow", "ends_resum"), "--allow ends_resum (did you mean 'ends_resume'?)"),
        (("trainer.v1.trainer_mode=separate_async",), "trainer.v1.trainer_mode=separate_async: needs fuse or sync"),
        (("fuse.interstage.enabled=true",), "fuse.interstage.enabled=true: trials begin in observe mode"),
        (("~fuse",), "~fuse: trials begin in observe mode"),
        (("data.trian_files=x",), "there is no key data.trian_files"),
        (("--steps", "1"), "--steps"),
        (("--checkpoint", "nowhere"), "--checkpoint nowhere: needs a folder global_step_N"),
        (("--checkpoint", "x", "--allow", "ends_resume"), "--allow ends_resume: not with --checkpoint"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(tuned, home: Path, arguments, said: str):
    code, out, err = tuned(never, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("of_config", [True, False])
def test_a_cluster_that_already_runs_is_refused_before_anything_starts(tuned, home: Path, monkeypatch, of_config: bool):
    words = ["+ray_kwargs.ray_init.address=10.0.0.1:6379"] if of_config else []
    named = words[0].lstrip("+") if words else "RAY_ADDRESS=10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local" if words else "10.0.0.1:6379")
    code, _, err = tuned(never, *BASE, *words)
    assert code == 2
    assert f"{named}: trials need a Ray of their own: leave it out, or RAY_ADDRESS=local" in err
    assert list(home.iterdir()) == []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert tuned(by_requests, *BASE)[0] == 0


def test_a_disk_without_room_is_refused_before_anything_starts(tuned, home: Path, monkeypatch):
    monkeypatch.setattr(trials.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**40, 2**40, 100 * 2**20))
    code, _, err = tuned(never, *BASE)
    assert code == 2
    # Of four steps 64 rows of 256 tokens.
    assert f"{home}: 100 MiB are free, trials need 260 for their logs and recorded rollouts" in err
    assert list(home.iterdir()) == []
    monkeypatch.setattr(trials.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**40, 2**40, 261 * 2**20))
    assert tuned(by_requests, *BASE)[0] == 0


def test_a_folder_in_which_another_search_makes_trials_is_refused(tuned, home: Path):
    folder = home / "grpo-cpu-tune"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711 on elsewhere")
        lock.flush()
        code, out, err = tuned(never, *BASE)
    assert (code, out) == (2, "")
    assert f"{folder}: verl-fuse tune makes trials there already (process 4711 on elsewhere): wait until it has" in err
    assert "or end it; $VERL_FUSE_HOME names another folder" in err
    # The lock has ended with its process, whose number is still in the file.
    during = []

    def looks(overrides: tuple[str, ...]) -> Outcome:
        during.append((folder / "lock").read_text().split()[0])
        return by_requests(overrides)

    assert tuned(looks, *BASE)[0] == 0
    assert set(during) == {str(os.getpid())}


def test_a_base_whose_budget_is_below_the_longest_sequence_is_refused(tuned):
    packed = (f"{ACTOR}.use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true")
    code, _, err = tuned(never, *BASE, *packed, f"{ACTOR}.ppo_max_token_len_per_gpu=255")
    assert code == 2
    assert f"{ACTOR}.ppo_max_token_len_per_gpu=255: needs 256 or more" in err


def test_a_budget_that_the_base_s_trial_uses_up_is_named(tuned, monkeypatch):
    # Seconds from one look at the clock to the next.
    clock = itertools.count(0.0, 70.0)
    monkeypatch.setattr(tune, "Search", partial(Search, clock=lambda: next(clock)))
    code, out, err = tuned(by_requests, *BASE, "--budget", "2")
    assert code == 0
    assert "--budget 2 has no room for a second trial: the base's took 1.2 minutes" in err
    assert "Verdict: nothing better than what you have: the base alone was tried." in out


OWN = (
    f"{ROLLOUT}.name=vllm",
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
    f"{SEQS}=8",
)


def test_a_run_of_one_s_own_is_tuned_by_its_arguments(tuned):
    code, out, err = tuned(by_requests, SEQS, "--", *OWN, name="--keys")
    assert code == 0, err
    assert f"Overrides to paste:\n  {SEQS}=32\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (*OWN, "trainer.v1.trainer_mode=colocate_async"),
            "trainer.v1.trainer_mode=colocate_async: needs fuse or sync",
        ),
        ((*OWN, "fuse.preset=fast"), "fuse.preset=fast: trials begin in observe mode"),
        ((*OWN, "data.trian_files=x"), "there is no key data.trian_files"),
        (OWN[:2], f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: needs a whole number"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused_before_anything_starts(tuned, home: Path, arguments, said: str):
    code, out, err = tuned(never, *arguments, name="--")
    assert (code, out) == (2, "")
    assert said in err
    assert list(home.iterdir()) == []


MINE = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, fuse: streaming, _self_]\n"


def test_features_of_a_configuration_of_one_s_own_are_off_or_refused(tuned, home: Path):
    (home / "mine.yaml").write_text(MINE)
    words = (SEQS, "--", "--config-path", str(home), "--config-name", "mine", *OWN)
    code, _, err = tuned(by_requests, *words, name="--keys")
    assert code == 0, err
    (home / "mine.yaml").write_text(f"{MINE}fuse: {{interstage: {{enabled: true}}}}\n")
    code, _, err = tuned(never, *words, name="--keys")
    assert code == 2
    assert "fuse.interstage.enabled=true: trials begin in observe mode, without features: leave it out" in err


UPDATE = "actor_rollout_ref.actor.use_kl_loss=false"
# What the preset switches on for grpo-cpu without a KL loss, and what it sets beside.
INTERSTAGE, ZERO = "fuse.interstage.enabled=true", "fuse.update.skip_zero_gradient=true"


def test_features_that_the_preset_chooses_are_tried_together_and_one_by_one(tuned):
    tried = []

    def faster(overrides: tuple[str, ...]) -> Outcome:
        tried.append(overrides)
        return FAST if ZERO in overrides else SLOW

    code, out, err = tuned(faster, *BASE, UPDATE, "--with-features", "--json")
    assert code == 0, err
    assert tried[0] == ()
    together = tried[1]
    assert {ZERO, "fuse.update.metrics=computed"} < set(together)
    assert all(each.startswith("fuse.") for each in together)
    found = json.loads(out)["best"]["overrides"]
    # As the recipe is, and as its trials were.
    assert found == ["fuse=default", *together]


def test_a_set_with_features_switches_verl_fuse_on_in_a_run_of_stock_verl(tuned):
    words = (SEQS, "--with-features", "--", *OWN, "trainer.n_gpus_per_node=8")
    code, out, err = tuned(lambda overrides: FAST if overrides else SLOW, *words, name="--keys")
    assert code == 0, err
    pasted = out.partition("Overrides to paste:\n")[2].split()
    assert pasted[:3:2] == ["+fuse=default", "trainer.v1.trainer_mode=fuse"]
    assert any(line.startswith("fuse.") for line in pasted)
    assert "rounds" in out


def test_with_features_is_refused_where_the_preset_chooses_none(tuned):
    # Nothing pays where each prompt has one sample of a model with a KL loss, on one replica.
    one = (f"{ROLLOUT}.name=sglang", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1")
    alone = (f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.use_fused_kernels=true", f"{ACTOR}.shuffle=true")
    code, _, err = tuned(never, SEQS, "--with-features", "--", *OWN[1:], *one, *alone, name="--keys")
    assert code == 2
    assert "--with-features: fuse.preset=fast switches nothing on in this run: verl-fuse check says why" in err


@pytest.mark.parametrize(("memory", "refused"), [(4 * 2**30, False), (4 * 2**30 - 1, True)])
def test_what_would_not_fit_at_the_longest_samples_is_not_tried(memory: int, refused: bool):
    """The base's trial took 1 GiB; at the longest samples the base needs 2 more, and the change 3."""
    base = Trial((), replace(FAST, peak_bytes=2**30), 1.0)
    known = Foreseen(lambda *_: None, lambda overrides: (3.0 if overrides else 2.0) * 2**30, memory)
    found = tune.too_large(known, [base], (f"{SIZE}=4",))
    assert (found is not None) == refused
    if found:
        why = "a rank would need 4.0 GiB at the longest prompts and responses, and has 4.0"
        assert found == Outcome("out_of_memory", reason=f"predicted, not tried: {why}")
    # What the base needs anyway is the base's affair, and what is not known is tried.
    assert (
        tune.too_large(replace(known, more_at_limits=lambda overrides: 2.0 * 2**30, memory=1.0), [base], ("x",)) is None
    )
    assert tune.too_large(known, [replace(base, outcome=SLOW)], (f"{SIZE}=4",)) is None
    assert tune.too_large(NOTHING, [base], (f"{SIZE}=4",)) is None


def test_json_is_one_object_on_stdout(tuned, documented_keys):
    code, out, err = tuned(by_requests, *BASE, "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == documented_keys["tune"]
    assert found["base"]["seconds"] == pytest.approx(2.0)
    best = found["best"]
    assert best["overrides"] == [f"{SEQS}=32"]
    assert (best["seconds"], best["ratio"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert 1 < best["ratio_interval"][0] < 2 < best["ratio_interval"][1]
    assert best["interval"][0] < 1.0 < best["interval"][1]
    assert set(best) == {"overrides", "seconds", "interval", "ratio", "ratio_interval"}
    assert found["trials"][:3] == [
        *(
            {
                "overrides": overrides,
                "replayed": False,
                "final": False,
                "predicted_seconds": None,
                "seconds": seconds,
                "outcome": outcome,
                "reason": reason,
                "peak_bytes": peak,
            }
            for overrides, seconds, outcome, reason, peak in (
                ([], 2.0, "measured", None, None),
                ([f"{SEQS}=32"], 1.0, "measured", None, 2**30),
                ([f"{SEQS}=16"], None, "out_of_memory", "CUDA out of memory", None),
            )
        )
    ]
    assert [trial["final"] for trial in found["trials"]] == [False] * 3 + [True] * 4
    assert 0 <= found["minutes"] < 15
    assert "trial 1, recorded: the base" in err


def test_the_table_has_every_trial_and_the_verdict_comes_last(tuned):
    code, out, _ = tuned(by_requests, *BASE)
    lines = [line.strip() for line in out.splitlines()]
    assert code == 0
    assert f"Overrides to paste:\n  {SEQS}=32\n" in out
    assert lines[-1].startswith("Verdict: steps are 2.00 [")
    assert any("the base" in line and "2.00 [" in line for line in lines)
    assert any(f"{SEQS}=32" in line and "1.00 [" in line and "rounds" in line for line in lines)
    assert "out of memory: CUDA" in out
    assert "final" in out


def test_nothing_better_has_nothing_to_paste(tuned):
    code, out, _ = tuned(lambda overrides: SLOW, *BASE)
    assert code == 0
    assert "paste" not in out
    assert "Verdict: nothing better than what you have: none of 2 other trials was faster by 2%." in out
    assert json.loads(tuned(lambda overrides: SLOW, *BASE, "--json")[1])["best"]["overrides"] == []


@pytest.mark.parametrize("kind", ["crashed", "out_of_memory", "hung", "refused"])
def test_a_base_that_fails_its_own_trial_ends_it(tuned, kind: str):
    code, out, err = tuned(lambda overrides: Outcome(kind, reason="KeyError: 'x'"), *BASE, "--json")
    assert (code, out) == (1, "")
    assert f"the base's own trial: {kind.replace('_', ' ')}: KeyError: 'x'" in err


def test_ctrl_c_prints_the_best_so_far(tuned):
    def until(overrides: tuple[str, ...]) -> Outcome:
        if f"{SEQS}=16" in overrides:
            raise KeyboardInterrupt
        return by_requests(overrides)

    code, out, _ = tuned(until, *BASE)
    assert code == 0
    assert f"Overrides to paste:\n  {SEQS}=32\n" in out
    assert "ended before all trials were made" in out


def test_ctrl_c_in_the_base_has_nothing_to_print(tuned):
    def stop(overrides: tuple[str, ...]) -> Outcome:
        raise KeyboardInterrupt

    assert tuned(stop, *BASE)[:2] == (130, "")
