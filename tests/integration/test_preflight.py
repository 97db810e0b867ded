"""A bad configuration ends in the driver with one message, before Ray is up, under verl's own entry point."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from verl_fuse.host.start import preflight
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
    ],
)
def test_a_bad_configuration_is_refused_before_ray_starts(overrides, message, tmp_path):
    done = run(*overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "ray init" not in done.stdout


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
    monkeypatch.setattr(preflight, "require_contracts", lambda manager, config: checked.append(config))
    config = OmegaConf.create({"fuse": {"run_dir": "/runs/a"}})
    Preflight().on_job_start(config)
    assert [found.engine.folder for found in checked] == ["/runs/a"]
    assert "engine" not in config


def test_a_check_that_fails_keeps_the_run_from_starting(monkeypatch, capsys):
    """Hydra makes a warning of a callback's exception."""

    def fails(config):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(preflight, "load_settings", fails)
    with pytest.raises(SystemExit) as ended:
        Preflight().on_job_start(OmegaConf.create({}))
    assert ended.value.code == 2
    assert "disk on fire" in capsys.readouterr().err


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
