"""`verl-fuse ab NAME`: what its two runs are. That they run is tested with verl itself (tests/integration)."""

import subprocess
import sys

import pytest

from verl_fuse.cli import ab
from verl_fuse.cli.ab import plan_runs
from verl_fuse.cli.main import main
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import PlannedRun
from verl_fuse.errors import FuseError

pytest.importorskip("hydra")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))


def planned(tmp_path, *overrides, baseline="stock"):
    return plan_runs(find_recipe("ppo-cpu"), overrides, tmp_path, baseline)


def test_both_runs_start_anew_in_folders_of_their_own_and_overrides_of_verl_fuse_go_to_the_fused_one(tmp_path):
    ours = ("fuse.interstage.enabled=true", "++fuse.interstage.layout=shared", "trainer.v1.trainer_mode=fuse")
    shared = ("trainer.save_freq=-1", "data.seed=7", "trainer.v1.sampler.sync_refill_failed_groups=false")
    stock, fused = planned(tmp_path, *ours, *shared).values()
    assert (stock.run_dir, fused.run_dir) == (tmp_path / "ppo-cpu-ab-stock", tmp_path / "ppo-cpu-ab-fused")
    assert {"trainer.resume_mode=disable", "trainer.v1.trainer_mode=sync", "~fuse", *shared} <= set(stock.command)
    assert not set(ours) & set(stock.command)
    assert {"trainer.resume_mode=disable", *ours, *shared} <= set(fused.command)
    assert not {"trainer.v1.trainer_mode=sync", "~fuse"} & set(fused.command)


@pytest.mark.parametrize(
    ("baseline", "names"),
    [("stock", ["stock", "fused"]), ("observe", ["observe", "fused"]), ("both", ["stock", "observe", "fused"])],
)
def test_a_run_in_observe_mode_has_nothing_switched_on(tmp_path, baseline, names):
    found = plan_runs(
        find_recipe("dapo-cpu"), ["fuse.preset=fast", "fuse.poll_interval=0.5", "data.seed=7"], tmp_path, baseline
    )
    assert list(found) == names
    assert [run.run_dir.name for run in found.values()] == [f"dapo-cpu-ab-{name}" for name in names]
    assert {run.config.data.seed for run in found.values()} == {7}
    modes = {name: run.config.trainer.v1.trainer_mode for name, run in found.items()}
    assert modes == {name: "sync" if name == "stock" else "fuse" for name in names}
    if "observe" in found:
        observe = found["observe"]
        assert (observe.config.fuse.preset, observe.config.fuse.poll_interval) == ("observe", 0.5)
        assert [observe.config.fuse.interstage.enabled, found["fused"].config.fuse.interstage.enabled] == [False, True]
        assert not [note for note in observe.notes if "switches on" in note]


def test_one_folder_for_both_is_refused(tmp_path):
    with pytest.raises(
        FuseError, match=r"^trainer\.default_local_dir=.*: `ab` makes 2 runs, each in a folder of its own"
    ):
        planned(tmp_path, f"trainer.default_local_dir={tmp_path}/here")


def test_a_bad_override_is_refused_before_either_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ab, "execute", lambda launch: pytest.fail(f"{launch} was started"))
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu", "trainer.total_steps=4"])
    assert stop.value.code == 2
    assert "total_steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"), [(["--at-least", "inf"], "--at-least inf: needs a finite"), (["--html", "."], "it is a folder")]
)
def test_an_option_that_cannot_be_served_is_refused_before_either_run(monkeypatch, capsys, option, said):
    monkeypatch.setattr(ab, "execute", lambda launch: pytest.fail(f"{launch} was started"))
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu", *option])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_wrong_with_both_runs_is_said_once_and_with_what_is_wrong_with_one(tmp_path):
    with pytest.raises(FuseError) as refused:
        planned(tmp_path, "trainer.total_steps=4", "fuse.interstage.enabld=true")
    first, second = map(str, refused.value.args)
    assert "there is no key trainer.total_steps" in first
    assert "did you mean 'enabled'?" in second


@pytest.mark.parametrize("loggers", ["[console]", "console", "[]", "null"])
def test_runs_that_log_to_no_file_cannot_be_compared(tmp_path, loggers):
    with pytest.raises(
        FuseError, match=r"^trainer\.logger=.*: needs file among them: `ab` compares the runs' metrics\.jsonl$"
    ):
        planned(tmp_path, f"trainer.logger={loggers}")


@pytest.mark.parametrize("loggers", ["[console,file]", "file"])
def test_runs_that_log_to_a_file_can(tmp_path, loggers):
    planned(tmp_path, f"trainer.logger={loggers}")


def test_the_baseline_is_one_that_there_is(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu", "--baseline", "stok"])
    assert stop.value.code == 2
    assert "'stock', 'observe', 'both'" in capsys.readouterr().err


def test_switched_off_no_run_is_made(monkeypatch, capsys):
    monkeypatch.setenv("VERL_FUSE", "off")
    monkeypatch.setattr(ab, "execute", lambda launch: pytest.fail(f"{launch} was started"))
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu"])
    assert stop.value.code == 2
    assert "VERL_FUSE=off in the environment: no run would be one with verl-fuse" in capsys.readouterr().err


def test_a_first_run_that_fails_ends_it_with_its_exit_code(monkeypatch):
    started: list[PlannedRun] = []
    monkeypatch.setattr(ab, "execute", lambda launch: started.append(launch) or 7)
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu"])
    assert stop.value.code == 7
    assert len(started) == 1


PRINTS = """
import os, subprocess, sys
from verl_fuse.cli.ab import stdout_to_stderr
with stdout_to_stderr():
    print("from here")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    os.write(1, b"from below\\n")
print("after")
"""


def test_what_the_runs_print_does_not_reach_stdout():
    done = subprocess.run([sys.executable, "-c", PRINTS], check=True, capture_output=True, text=True)
    assert done.stdout == "after\n"
    assert done.stderr.splitlines() == ["from here", "from a child", "from below"]


def test_a_warm_up_that_leaves_no_step_is_refused_before_either_run(monkeypatch, capsys):
    monkeypatch.setattr(ab, "execute", lambda launch: pytest.fail(f"{launch} was started"))
    with pytest.raises(SystemExit) as stop:
        main(["ab", "ppo-cpu", "--warm-up", "4", "trainer.total_training_steps=4"])
    assert stop.value.code == 2
    assert "--warm-up 4: leaves no step of the 4" in capsys.readouterr().err
