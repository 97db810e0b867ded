"""A bad configuration ends in the driver with one message, before Ray is up, under verl's own entry point."""

import subprocess
import sys

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

pytest.importorskip("verl")
from verl_fuse.host.start import settings
from verl_fuse.host.start.compat import start
from verl_fuse.host.start.preflight import Preflight

pytestmark = pytest.mark.integration


def run(*overrides: str) -> subprocess.CompletedProcess:
    # verl's own defaults lack micro-batch sizes.
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+fuse=default",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        *overrides,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+fuse.interstage.enable=true"], "verl-fuse: fuse.interstage.enable: unknown key (did you mean 'enabled'?)"),
        (
            ["trainer.v1.trainer_mode=fuse", "fuse.interstage.micro_group=-1", "fuse.poll_interval=0"],
            (
                "verl-fuse: 2 problems:\n  - fuse.poll_interval=0.0: needs >= 0.001 and <= 60.0\n"
                "  - fuse.interstage.micro_group=-1: needs >= 1\n"
            ),
        ),
        (
            ["fuse.interstage.enabled=true"],
            "trainer.v1.trainer_mode='sync': fuse.interstage.enabled=true needs trainer.v1.trainer_mode=fuse",
        ),
        (
            [
                "trainer.v1.trainer_mode=fuse",
                "trainer.total_training_steps=abc",
                "actor_rollout_ref.actor.optim.lr=fast",
            ],
            (
                "verl-fuse: 2 problems:\n  - actor_rollout_ref.actor.optim.lr='fast': needs a number\n"
                "  - trainer.total_training_steps='abc': needs a number\n"
            ),
        ),
        (
            [
                "trainer.v1.trainer_mode=fuse",
                "actor_rollout_ref.rollout.name=vllmm",
                "algorithm.adv_estimator=grop",
                "trainer.total_training_steps=0",
                "trainer.val_before_train=false",
            ],
            (
                "verl-fuse: 3 problems:\n  - trainer.total_training_steps=0: trains no step: needs >= 1, or null for "
                "all of trainer.total_epochs; trainer.val_only=true validates alone\n"
                "  - actor_rollout_ref.rollout.name='vllmm': not registered in verl (did you mean 'vllm'?); allowed: "
            ),
        ),
    ],
)
def test_a_bad_configuration_is_refused_before_ray_starts(overrides, message, tmp_path):
    done = run(*overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "ray init" not in done.stdout


def test_a_finished_run_ends_before_ray_starts(tmp_path):
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    finished = [
        "trainer.v1.trainer_mode=fuse",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=5",
        "critic.enable=false",
    ]
    done = run(*finished, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"verl-fuse: nothing is left to do: {tmp_path}/global_step_5 is the checkpoint of step 5" in done.stderr
    assert "ray init" not in done.stdout


def test_a_program_of_the_users_may_register_names_that_verl_lacks():
    config = OmegaConf.create({"algorithm": {"adv_estimator": "acme"}, "fuse": {}})
    with pytest.raises(SystemExit):
        Preflight().on_job_start(config)
    Preflight().on_job_start(config, task_function=lambda config: None)


@pytest.mark.parametrize(("steps", "code"), [(5, 0), (6, None)])
def test_a_run_is_finished_at_its_last_step_and_not_before(tmp_path, capsys, steps, code):
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "total_training_steps": steps}
    config = OmegaConf.create({"trainer": trainer, "fuse": {}})
    if code is None:
        Preflight().on_job_start(config)
        assert capsys.readouterr().err == ""
        return
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(config)
    assert ended.value.code == code
    assert "nothing is left to do" in capsys.readouterr().err
    with open_dict(config):
        config.hydra = {"mode": RunMode.MULTIRUN}
    Preflight().on_job_start(config)
    assert "nothing is left to do" in capsys.readouterr().err, "the other jobs go on"


def test_data_and_checkpoint_are_looked_at_in_the_driver(tmp_path, capsys):
    trainer = {"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/global_step_4"}
    data = {"train_files": "far/away.parquet", "train_batch_size": 4, "train_max_samples": 3}
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(OmegaConf.create({"trainer": trainer, "data": data, "fuse": {}}))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("verl-fuse: 2 problems:\n  - data.train_max_samples=3: ")
    assert f"\n  - trainer.resume_from_path='{tmp_path}/global_step_4': there is no such folder" in said


def test_what_is_set_for_nothing_is_pointed_out(capsys):
    Preflight().on_job_start(OmegaConf.create({"fuse": {"elastic": {"scale": True}}}))
    expected = "verl-fuse: warning: fuse.elastic.scale=true: no effect while fuse.elastic.enabled=false\n"
    assert capsys.readouterr().err == expected


def test_contracts_are_checked_of_what_plugins_set(installed_plugin, monkeypatch):
    source = """
from verl_fuse.hookspecs import hookimpl

class Sets:
    HOOK_API = 2

    @hookimpl
    def fuse_overrides(self, config, run_dir):
        return {"engine.folder": str(run_dir)}
"""
    installed_plugin("sets", source, value="acme_fuse_sets:Sets")
    checked = []
    monkeypatch.setattr(start, "require_contracts", lambda manager, config: checked.append(config))
    config = OmegaConf.create({"fuse": {"run_dir": "/runs/a"}})
    Preflight().on_job_start(config)
    assert [found.engine.folder for found in checked] == ["/runs/a"]
    assert "engine" not in config


def test_a_check_that_fails_keeps_the_run_from_starting(monkeypatch, capsys):
    """Hydra makes a warning of a callback's exception."""

    def fails(config, **options):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(settings, "load_settings", fails)
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(OmegaConf.create({}))
    assert ended.value.code == 2
    assert "disk on fire" in capsys.readouterr().err


def test_switched_off_the_block_is_not_read(monkeypatch, capsys):
    monkeypatch.setenv("VERL_FUSE", "off")
    # Set and taken back after the test: the switch sets it for Ray.
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "verl_fuse.host.switch.with_variable")
    refused = OmegaConf.create({"fuse": {"poll_interval": 0}})
    Preflight().on_job_start(refused)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("VERL_FUSE", "on")
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(refused)
    assert ended.value.code == 2


def test_a_switch_that_says_neither_is_refused_in_the_driver(monkeypatch, capsys):
    monkeypatch.setenv("VERL_FUSE", "no")
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(OmegaConf.create({"fuse": {}}))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "verl-fuse: VERL_FUSE='no' in the environment: needs on or off; unset, it is on\n"


def test_two_trainers_of_one_name_are_refused_by_name():
    program = (
        "import sys; from verl_fuse.host.upstream.on_import import on_import\n"
        "def other(v1):\n"
        "    Other = type('Other', (v1.PPOTrainerSync,), {'__module__': 'acme.trainers'})\n"
        "    v1.register_trainer('fuse')(Other)\n"
        "on_import('verl.trainer.ppo.v1', other)\n"
        "import verl.trainer.ppo.v1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "trainer mode 'fuse' is already registered by acme.trainers.Other" in done.stderr
