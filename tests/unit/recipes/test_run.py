import os
import sys

import pytest

from verl_fuse.cli import run
from verl_fuse.cli.checks import check_data_file
from verl_fuse.cli.composition import check_syntax
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import home_from, plan
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat import start

pytest.importorskip("hydra")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))


def planned(tmp_path, *overrides, recipe="ppo-cpu", baseline=False):
    return plan(find_recipe(recipe), list(overrides), baseline=baseline, home=tmp_path)


def test_a_run_is_verls_own_entry_point_on_the_recipes_configuration(tmp_path):
    launch = planned(tmp_path, "trainer.total_training_steps=3")
    folder = str(find_recipe("ppo-cpu").folder)
    module = ("-m", "verl.trainer.main_ppo", "--config-path", folder, "--config-name", "config")
    assert launch.command == (sys.executable, *module, "trainer.total_training_steps=3")
    assert launch.prepare == (sys.executable, "-m", "verl_fuse_cpu.task", "--out", str(tmp_path / "tasks" / "euclid"))
    assert planned(tmp_path, "recipe.prepare=null").prepare is None
    assert launch.run_dir == tmp_path / "ppo-cpu"
    assert launch.metrics == tmp_path / "ppo-cpu" / "metrics.jsonl"
    assert launch.environment["VERL_PLATFORM"] == "cpu"
    assert launch.data_files == tuple(
        str(tmp_path / "tasks" / "euclid" / name) for name in ("train.parquet", "validation.parquet")
    )


def test_the_baseline_is_stock_verl_in_a_directory_of_its_own(tmp_path):
    launch = planned(tmp_path, "trainer.total_training_steps=3", baseline=True)
    assert launch.command[-4:] == (
        "trainer.experiment_name=ppo-cpu-baseline",
        "trainer.v1.trainer_mode=sync",
        "~fuse",
        "trainer.total_training_steps=3",
    )
    assert launch.run_dir == tmp_path / "ppo-cpu-baseline"


def test_a_gpu_recipe_prepares_nothing_and_touches_no_environment_of_the_cpu_platform(tmp_path):
    launch = planned(tmp_path, recipe="grpo-gsm8k-8gpu")
    assert launch.prepare is None
    assert set(launch.environment) == {"VERL_FUSE_HOME", "VERL_FILE_LOGGER_PATH", "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_training_steps", r"override 'trainer\.total_training_steps' cannot be read"),
        ("a=[1", r"override 'a=\[1' cannot be read"),
        (
            "trainer.zzz=1",
            r"^trainer\.zzz=1: there is no key trainer\.zzz; \+trainer\.zzz=1 adds one that verl's files",
        ),
        (
            "trainer.total_traning_steps=3",
            r"no key trainer\.total_traning_steps \(did you mean 'total_training_steps'\?\)",
        ),
        (
            "fuse.interstage.enabld=true",
            r"no key fuse\.interstage\.enabld \(did you mean 'enabled'\?\); allowed: enabled, layout",
        ),
        (
            "fuse.acme.pieces=4",
            r"no key fuse\.acme\.pieces; allowed: run_dir, .*; a plugin's: \+\+fuse\.acme\.pieces=4$",
        ),
        ("fuse.acme=4", r"no key fuse\.acme .*observe$"),
        (
            "fuse.interstag.enabled=true",
            r"no key fuse\.interstag\.enabled \(did you mean 'interstage'\?\); allowed: run_dir",
        ),
        (
            "~fuse",
            r"^trainer\.v1\.trainer_mode=fuse needs the block that ~fuse takes away: for stock verl use --baseline$",
        ),
        ("fuse.interstage.micro_group=-1", r"^fuse\.interstage\.micro_group=-1: needs >= 1$"),
        (
            "critic.ppo_micro_batch_size_per_gpu=null",
            r"^critic\.ppo_micro_batch_size_per_gpu=null: needs a whole number",
        ),
        (
            "recipe.prepare=nope",
            "recipe.prepare='nope': allowed: euclid, euclid-4-layers, euclid-tools, smollm2, or null to make nothing",
        ),
        ("fuse=nope", r"Could not find 'fuse/nope' Available options in 'fuse': default pipeline streaming tail$"),
        ("trainer.default_local_dir=${nope}", r"^trainer\.default_local_dir: Interpolation key 'nope' not found"),
        ("fuse=null", r"with \['fuse=null'\]: .* Got NoneType; a group .* takes the name of one, such as fuse=default"),
        ("fuse=1", r"with \['fuse=1'\]: .* Got int; a group"),
        ("data=null", r"with \['data=null'\]: .*; a group"),
        ("platform=[1,2]", r"with \['platform=\[1,2\]'\]: .*; a group"),
        ("trainer.default_local_dir=null", r"^trainer\.default_local_dir=null: needs a path$"),
        ("trainer.default_local_dir=5", r"^trainer\.default_local_dir=5: needs a path$"),
        ("trainer.default_local_dir=", r"^trainer\.default_local_dir='': needs a path$"),
        ("trainer=null", r"^trainer\.default_local_dir=null: needs a path$"),
        ("data.train_files=5", r"^data\.train_files=5: needs a path, a list of paths, or null$"),
        ("data.train_files=[1,2]", r"^data\.train_files=\[1, 2\]: needs a path"),
        ("data.val_files=[null]", r"^data\.val_files=\[None\]: needs a path"),
        ("data.val_files={a:1}", r"^data\.val_files={'a': 1}: needs a path"),
        ("recipe.prepare=[1]", r"recipe\.prepare=\[1\]: allowed: euclid"),
        ("task_dir=null", r"^task_dir=null: needs a path$"),
        ("trainer.total_training_steps=abc", r"^trainer\.total_training_steps='abc': needs a number$"),
        ("actor_rollout_ref.actor.optim.lr=fast", r"^actor_rollout_ref\.actor\.optim\.lr='fast': needs a number$"),
        ("actor_rollout_ref.rollout.n=3", r"^2 problems:\n  - .*ppo_mini_batch_size=15: times .*\n  - critic\."),
        ("trainer.use_v1=false", r"^trainer\.use_v1=false: verl-fuse needs verl's V1 trainer: true"),
        ("trainer.device=npu", r"trainer\.device='npu': trainer\.v1\.trainer_mode=fuse needs cuda or cpu"),
        ("trainer.resume_mode=resume_path", r"^trainer\.resume_from_path=null: trainer\.resume_mode=resume_path needs"),
        ("data.train_max_samples=15", r"^data\.train_max_samples=15: a batch has data\.train_batch_size=16 prompts"),
    ],
)
def test_a_bad_override_is_refused_before_anything_starts(tmp_path, override, message):
    # 15 prompts are a mini-batch of two ranks with 4 samples each.
    more = ["actor_rollout_ref.actor.ppo_mini_batch_size=15"] if "rollout.n" in override else []
    with pytest.raises(FuseError, match=message):
        planned(tmp_path, override, *more)


def test_what_stock_verl_trains_is_not_refused(tmp_path):
    stock = ("trainer.use_v1=false", "trainer.total_training_steps=null", "algorithm.kl_ctrl.horizon=1e4")
    assert planned(tmp_path, *stock, baseline=True).command[-3:] == stock
    assert planned(tmp_path, "data.train_max_samples=16", "trainer.val_before_train=yes").done is None
    assert planned(tmp_path, "trainer.device=npu", baseline=True).resumed is None


@pytest.fixture
def finished(tmp_path):
    """The folder of a run of ppo-cpu with the checkpoint of its third step."""
    (tmp_path / "ppo-cpu" / "global_step_3").mkdir(parents=True)
    (tmp_path / "ppo-cpu" / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path / "ppo-cpu"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_finished_run_says_so_and_starts_nothing(finished, monkeypatch, capsys, dry_run):
    monkeypatch.setattr(run, "execute", lambda launch, verbose: pytest.fail(f"{launch} was started"))
    run.run("ppo-cpu", ["trainer.total_training_steps=3"], dry_run=dry_run)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"verl-fuse: nothing is left to do: {finished}/global_step_3 is the checkpoint of step 3, and the run ends "
        "with trainer.total_training_steps=3. Larger values go on from there, trainer.resume_mode=disable starts anew, "
        "and trainer.val_only=true validates\n"
    )


@pytest.mark.parametrize("more", ["trainer.total_training_steps=4", "trainer.resume_mode=disable"])
def test_a_run_that_has_steps_left_starts(finished, monkeypatch, more):
    monkeypatch.setattr(run, "execute", lambda launch, verbose: 7)
    with pytest.raises(run.typer.Exit) as ended:
        run.run("ppo-cpu", ["trainer.total_training_steps=3", more])
    assert ended.value.exit_code == 7


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    wrong = [
        "fuse.interstage.enabld=true",
        "trainer.zzz=1",
        "fuse.elastic.enabled=maybe",
        "trainer.v1.trainer_mode=sync",
    ]
    with pytest.raises(FuseError) as error:
        planned(tmp_path, *wrong, "fuse.interstage.enabled=true")
    assert [str(problem).partition(":")[0] for problem in error.value.args] == [
        "fuse.interstage.enabld=true",
        "trainer.zzz=1",
        "fuse.elastic.enabled='maybe'",
        "trainer.v1.trainer_mode='sync'",
    ]
    with pytest.raises(FuseError, match=r"^2 problems:"):
        planned(tmp_path, "a=[1", "b")


def test_a_dry_run_is_checked_as_a_run_is(tmp_path, capsys):
    with pytest.raises(FuseError, match=r"fuse\.interstage\.micro_group=-1: needs >= 1"):
        run.run("ppo-cpu", ["fuse.interstage.micro_group=-1"], dry_run=True)
    run.run("ppo-cpu", ["fuse.elastic.scale=true"], dry_run=True)
    said = capsys.readouterr()
    assert said.err == "verl-fuse: warning: fuse.elastic.scale=true: no effect while fuse.elastic.enabled=false\n"
    assert "verl.trainer.main_ppo" in said.out


@pytest.mark.parametrize("switch", ["off", "on", None])
def test_the_printed_script_switches_off_what_the_command_would(tmp_path, capsys, monkeypatch, switch):
    monkeypatch.delenv("VERL_FUSE", raising=False)
    if switch:
        monkeypatch.setenv("VERL_FUSE", switch)
    run.run("ppo-cpu", dry_run=True)
    assert ("export VERL_FUSE=off\n" in capsys.readouterr().out) == (switch == "off")


SETS = """
from verl_fuse.hookspecs import hookimpl

class Sets:
    HOOK_API = 2

    @hookimpl
    def fuse_overrides(self, config, run_dir):
        return {{"trainer.total_training_steps": {value}}}
"""


def test_what_plugins_set_is_checked_before_anything_starts(tmp_path, installed_plugin):
    for name, value in (("one", 3), ("two", 4)):
        source, distribution = SETS.format(value=value), f"acme-{name}"
        installed_plugin(name, source, distribution=distribution, value=f"acme_{name}_{name}:Sets")
    with pytest.raises(FuseError, match=r"two plugins set trainer\.total_training_steps: to"):
        planned(tmp_path)


def test_a_check_leaves_the_environment_as_it_was(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    planned(tmp_path)
    assert "VERL_PLATFORM" not in os.environ


def test_hydras_grammar_is_accepted():
    check_syntax(["a.b=1", "+c={d:1}", "~e", "f='x y'", "g=[1,2]"])


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"verl is not installed: verl-fuse needs verl >=0\.9\.1,<0\.10 \(pip install -e '.*\[verl\]'\)"),
        ("0.8.0", r"verl 0\.8\.0 is not supported"),
        ("0.10.0", r"verl 0\.10\.0 is not supported"),
    ],
)
def test_a_run_needs_a_supported_verl(monkeypatch, version, message):
    monkeypatch.setattr(start, "installed", lambda name: version if name == "verl" else "0.1.11")
    with pytest.raises(FuseError, match=message):
        run.run("ppo-cpu", dry_run=True)


def test_a_data_file_that_is_missing_or_no_parquet_is_named(tmp_path):
    with pytest.raises(FuseError, match=r"data file .*train\.parquet cannot be read: No such file or directory"):
        check_data_file(str(tmp_path / "train.parquet"))
    (tmp_path / "page.parquet").write_text("<html>")
    with pytest.raises(FuseError, match=r"page\.parquet is not a Parquet file: it starts with b'<htm', not b'PAR1'"):
        check_data_file(str(tmp_path / "page.parquet"))


def test_runs_are_kept_below_the_working_directory_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert home_from({}) == tmp_path / "runs"
    assert home_from({"VERL_FUSE_HOME": "elsewhere"}) == tmp_path / "elsewhere"
