"""Bases of `verl-fuse tune`: recipes, and arguments of verl's main_ppo."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli import trials
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.tuned import are_arguments, base_of_arguments, base_of_recipe, beginning_at, features_of
from verl_fuse.errors import FuseError
from verl_fuse.tune.search import Request

pytest.importorskip("hydra")

ACTOR, SEQS = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.max_num_seqs"
PACKED = (f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true")
WORDS = ("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=8", f"{SEQS}=64", "+data.extra=1", *PACKED)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    return tmp_path


def test_a_name_is_a_recipe_and_anything_with_a_value_an_argument():
    assert not are_arguments(["grpo-cpu", f"{SEQS}=8"])
    for words in ([f"{SEQS}=8"], ["+fuse=default"], ["--config-name", "x"], ["python3", "-m", "verl.trainer.main_ppo"]):
        assert are_arguments(words)


def test_arguments_compose_to_what_their_command_trains_with(home: Path):
    base = base_of_arguments(["python3", "-m", "verl.trainer.main_ppo", *WORDS])
    assert base.compose(()).actor_rollout_ref.rollout.max_num_seqs == 64
    assert base.compose((f"{SEQS}=128",)).actor_rollout_ref.rollout.max_num_seqs == 128
    launch = trials.planned(base, home, 2, Request((f"{SEQS}=128",), 3, 60.0))
    command = list(launch.command)
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert command[3 : 4 + len(WORDS)] == ["+fuse=default", *WORDS]
    # The trial's own come last, and win.
    assert command.index(f"{SEQS}=128") > command.index(f"{SEQS}=64")
    assert launch.run_dir == home / "main_ppo-tune" / "trial-02"
    assert "hydra.run.dir=${trainer.default_local_dir}/hydra" in command
    assert (launch.config.trainer.v1.trainer_mode, launch.config.fuse.preset) == ("fuse", "observe")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    "base", [lambda: base_of_arguments(WORDS), lambda: base_of_recipe(find_recipe("grpo-cpu"), ())]
)
def test_the_home_needs_no_variable(base, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("VERL_FUSE_HOME")
    launch = trials.planned(base(), tmp_path / "runs", 1, Request((), 3, 60.0))
    assert launch.run_dir.parent.parent == tmp_path / "runs"


def test_a_configuration_of_one_s_own_is_named_from_any_folder(home: Path, monkeypatch):
    mine = home / "mine.yaml"
    mine.write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: ['pkg://verl.trainer.config']}\ndata: {seed: 5}\n"
    )
    monkeypatch.chdir(home)
    base = base_of_arguments(["--config-path", ".", "--config-name", "mine", "data.train_batch_size=1024", *PACKED])
    launch = trials.planned(base, home, 1, Request((), 3, 60.0))
    assert (launch.config.data.seed, launch.config.data.train_batch_size) == (5, 1024)
    assert list(launch.command)[3:7] == ["--config-path", str(home.resolve()), "--config-name", "mine"]


def test_a_path_without_a_root_begins_in_the_folder_of_main_ppo(home: Path, monkeypatch):
    # Another file of that name is no argument's.
    (home / "config").mkdir()
    (home / "config" / "ppo_trainer.yaml").write_text("data: {seed: 5}\n")
    monkeypatch.chdir(home)
    for path in ("config", "./config"):
        base = base_of_arguments(["--config-path", path, "--config-name", "ppo_trainer", *WORDS])
        launch = trials.planned(base, home, 1, Request((), 3, 60.0))
        assert launch.config.data.train_batch_size == 1024
        command = list(launch.command)
        folder = Path(command[command.index("--config-path") + 1])
        assert folder.is_absolute()
        assert folder.parts[-3:] == ("verl", "trainer", "config")


@pytest.mark.parametrize("fuse", ["default", "streaming"])
def test_a_configuration_with_a_choice_of_fuse_gets_no_second_one(home: Path, fuse: str):
    path, chosen = "hydra: {searchpath: ['pkg://verl.trainer.config']}\n", f"[ppo_trainer, fuse: {fuse}, _self_]"
    (home / "mine.yaml").write_text(f"{path}defaults: {chosen}\n")
    # Hydra reads a search path in the primary configuration alone.
    (home / "common.yaml").write_text(f"defaults: {chosen}\n")
    (home / "above.yaml").write_text(f"{path}defaults: [common, _self_]\n")
    for name in ("mine", "above"):
        base = base_of_arguments(["--config-path", str(home), "--config-name", name, *WORDS])
        launch = trials.planned(base, home, 1, Request((), 3, 60.0))
        assert "fuse=default" in launch.command
        assert "+fuse=default" not in launch.command
        assert (launch.config.fuse.preset, launch.config.fuse.interstage.enabled) == ("observe", False)


def test_features_of_the_preset_are_candidates_whose_trial_has_them_on(home: Path):
    base = base_of_arguments([*WORDS, "actor_rollout_ref.rollout.name=vllm"])
    found = features_of(base, ())
    keys = [each.setting.key for each in found]
    assert {"fuse.interstage.enabled", "fuse.update.skip_zero_gradient"} <= {*keys}
    overrides = tuple(dict.fromkeys(override for each in found for override in each.overrides(True)))
    fuse = OmegaConf.to_container(trials.planned(base, home, 2, Request(overrides, 3, 60.0)).config.fuse)
    assert (fuse["preset"], fuse["interstage"]["enabled"]) == ("observe", True)
    assert (fuse["update"]["skip_zero_gradient"], fuse["update"]["metrics"]) == (True, "computed")
    # What is on is no candidate any more; what another value of verl's leaves nothing to do is none either.
    assert features_of(base, overrides) == ()
    with_loss = features_of(base, (f"{ACTOR}.use_kl_loss=true",))
    assert "fuse.update.skip_zero_gradient" not in [each.setting.key for each in with_loss]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.trian_batch_size=8"], "there is no key data.trian_batch_size"),
        (["data.train_batch_size=1,2"], "several values are a sweep"),
        (
            ["CUDA_VISIBLE_DEVICES=0", "python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8"],
            "CUDA_VISIBLE_DEVICES=0 python3 -m: trials start verl.trainer.main_ppo themselves; set variables in the",
        ),
        (["python3", "my_trainer.py", "data.train_batch_size=8"], "my_trainer.py: needs verl.trainer.main_ppo"),
        (["--config-name", "nowhere"], "nowhere.yaml is neither of verl"),
    ],
)
def test_what_verl_would_refuse_is_refused(words: list[str], said: str):
    with pytest.raises(FuseError, match=said.replace(".", r"\.")):
        base_of_arguments(words).compose(())


def test_a_recipe_s_own_features_are_off():
    assert base_of_recipe(find_recipe("dapo-cpu"), ()).compose(()).fuse.interstage.enabled is None


def test_the_home_is_in_the_arguments_whatever_stands_in_it(tmp_path: Path):
    home = tmp_path / "it's here\\"
    trainer = trials.planned(base_of_arguments(WORDS), home, 1, Request((), 3, 60.0)).config.trainer
    assert OmegaConf.to_container(trainer)["default_local_dir"] == str(home / "main_ppo-tune" / "trial-01")


def test_trials_keep_no_profile_of_a_run_of_one_s_own(home: Path):
    words = ("actor_rollout_ref.rollout.trace.backend=mlflow", "global_profiler.steps=[1]")
    base = base_of_arguments([*WORDS, *words, "ray_kwargs.timeline_json_file=/mine/ray.json"])
    config = trials.planned(base, home, 1, Request((), 3, 60.0)).config
    assert config.actor_rollout_ref.rollout.trace.backend is None
    assert (config.global_profiler.steps, config.ray_kwargs.timeline_json_file) == (None, None)


def test_trials_go_on_after_the_last_step_of_a_run(home: Path):
    folder = home / "it's mine" / "global_step_40"
    (folder / "actor").mkdir(parents=True)
    # A run of one epoch, whose 10 steps were made four times over.
    base = base_of_recipe(find_recipe("grpo-cpu"), ("trainer.total_epochs=1", "trainer.total_training_steps=40"))
    launch = trials.planned(beginning_at(base, folder), home, 1, Request((), 3, 60.0))
    trainer = launch.config.trainer
    assert trainer.resume_from_path == str(folder)
    # verl begins a step only in an epoch below the last, and an epoch may be one step.
    assert trainer.total_epochs > trainer.total_training_steps == 44
    assert launch.done is None


def test_trials_begin_after_the_step_of_a_checkpoint_and_only_read_it(home: Path):
    folder = home / "mine" / "global_step_40"
    (folder / "actor").mkdir(parents=True)
    base = beginning_at(base_of_recipe(find_recipe("grpo-cpu"), ("trainer.del_local_ckpt_after_load=true",)), folder)
    config = trials.planned(base, home, 1, Request((), 3, 60.0)).config
    trainer = config.trainer
    assert (trainer.resume_mode, trainer.resume_from_path) == ("resume_path", str(folder))
    assert (trainer.total_training_steps, trainer.del_local_ckpt_after_load) == (44, False)
    assert config.skip.rollout_tq.steps == [41, 42, 43, 44]
    for step in config.skip.rollout_tq.steps:
        assert not trials.has_recorded(base, home, 3)
        dump = home / f"grpo-cpu-tune/rollouts/grpo-cpu-tune_verl-fuse/GBS8_N8_in16_out240/{step}/0"
        dump.mkdir(parents=True)
        (dump / "meta.json").touch()
    assert trials.has_recorded(base, home, 3)


@pytest.mark.parametrize("folder", ["global_step_7", "global_step_x", "mine"])
def test_a_folder_that_is_no_checkpoint_is_refused(home: Path, folder: str):
    (home / "mine" / "actor").mkdir(parents=True)
    with pytest.raises(FuseError, match=f"--checkpoint .*{folder}: needs a folder global_step_N of a run, with actor/"):
        beginning_at(base_of_recipe(find_recipe("grpo-cpu"), ()), home / folder)
