"""Output and files of `verl-fuse run`, with a program in verl's place that prints and writes like verl."""

import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli import run
from verl_fuse.cli.run import METRICS_PATH_VARIABLE, PlannedRun, execute
from verl_fuse.errors import FuseError
from verl_fuse.timeline.files import INDEX_PAGE

SOURCE = "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m "
STEP = {"timing_s/step": 2.0, "timing_s/gen": 1.0}


@pytest.fixture
def launched(tmp_path):
    """Runs a program in verl's place: its exit code."""

    def launched(program: str, *, verbose: bool = False, **more) -> int:
        launch = PlannedRun(
            prepare=more.pop("prepare", None),
            command=(sys.executable, "-c", program),
            environment={METRICS_PATH_VARIABLE: str(tmp_path / "metrics.jsonl"), **more.pop("environment", {})},
            data_files=(),
            run_dir=tmp_path,
            **more,
        )
        return execute(launch, verbose=verbose)

    return launched


def logs(*records: tuple[int, dict]) -> str:
    """A program that writes the metrics file as verl does: emptied first."""
    lines = "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in records)
    return f"import os; open(os.environ[{METRICS_PATH_VARIABLE!r}], 'w').write({lines!r})\n"


def test_little_is_shown_and_everything_is_in_the_log(launched, tmp_path, capfd):
    noise = f"print({SOURCE!r} + 'noise')\n" * 50
    own = f"print({SOURCE!r} + 'verl-fuse: step 1/2 done in 2.0 s: 4/4 groups trained, ETA 2.0 s')\n"
    assert launched(noise + own + logs((1, STEP), (2, STEP))) == 0
    said = capfd.readouterr()
    assert "noise" not in said.out
    assert "verl-fuse: step 1/2 done in 2.0 s" in said.out
    assert SOURCE not in said.out
    assert f"everything that is printed goes to {tmp_path / 'run.log'}" in said.err
    assert (tmp_path / "run.log").read_text().count("noise") == 50
    assert f"Metrics: {tmp_path / 'metrics.jsonl'}\nLog: {tmp_path / 'run.log'}\n" in said.out
    assert "Timeline" not in said.out


def test_a_task_that_cannot_be_made_shows_why_and_nothing_is_trained(launched, tmp_path, capfd):
    (tmp_path / "metrics.jsonl").write_text("earlier")
    prepare = (sys.executable, "-c", "raise RuntimeError('no disk')")
    assert launched("print('trained')", prepare=prepare) == 1
    said = capfd.readouterr()
    assert "verl-fuse: making the task ended with exit code 1: RuntimeError: no disk\n" in said.err
    assert "trained" not in (tmp_path / "run.log").read_text()
    assert (tmp_path / "metrics.jsonl").read_text() == "earlier"


def test_a_task_that_is_smaller_than_a_batch_is_refused_once_it_is_made(launched, tmp_path):
    data = tmp_path / "train.parquet"
    made = f"import pyarrow as a, pyarrow.parquet as p; p.write_table(a.table({{'prompt': [1, 2, 3]}}), {str(data)!r})"
    pytest.importorskip("pyarrow")

    def trained(batch: int) -> int:
        config = OmegaConf.create({"data": {"train_files": str(data), "train_batch_size": batch}})
        return launched("print('trained')", prepare=(sys.executable, "-c", made), config=config)

    assert trained(3) == 0
    with pytest.raises(FuseError, match=r"^data\.train_batch_size=4: data\.train_files has 3 prompts"):
        trained(4)


def test_a_user_s_variables_win_except_the_path_of_the_metrics(launched, tmp_path, monkeypatch, capfd):
    elsewhere = tmp_path / "elsewhere.jsonl"
    monkeypatch.setenv(METRICS_PATH_VARIABLE, str(elsewhere))
    monkeypatch.setenv("VERL_PLATFORM", "the user's")
    program = "import os; print('verl-fuse: platform', os.environ['VERL_PLATFORM'])\n" + logs((1, STEP))
    assert launched(program, environment={"VERL_PLATFORM": "cpu"}) == 0
    said = capfd.readouterr().out
    assert "verl-fuse: platform the user's" in said
    assert f"Metrics: {tmp_path / 'metrics.jsonl'}" in said
    assert not elsewhere.exists()


def test_verbose_shows_everything(launched, tmp_path, capfd):
    assert launched("print('noise')", verbose=True) == 0
    assert "noise" in capfd.readouterr().out
    assert not (tmp_path / "run.log").exists()


def test_a_crash_shows_its_cause(launched, tmp_path, capfd):
    program = f"""
print("x" * 10)
print({SOURCE!r} + "Traceback (most recent call last):\\n  File 'a.py'\\nKeyError: 'of a worker'")
raise RuntimeError("disk on fire:\\n  - the left one")
"""
    assert launched(program) == 1
    said = capfd.readouterr().err
    assert "verl ended with exit code 1: RuntimeError: disk on fire:\n  - the left one\n" in said
    assert f"The last lines of {tmp_path / 'run.log'}:" in said


def test_a_run_that_breaks_off_early_leaves_what_earlier_runs_wrote_and_does_not_name_it(launched, tmp_path, capfd):
    (tmp_path / "metrics.jsonl").write_text("earlier")
    (tmp_path / INDEX_PAGE).write_text("earlier")
    assert launched("raise SystemExit(2)") == 2
    assert (tmp_path / "metrics.jsonl").read_text() == "earlier"
    assert not (tmp_path / "metrics.1.jsonl").exists()
    said = capfd.readouterr().out
    assert "Timeline" not in said
    assert "Metrics" not in said
    assert "Validation" not in said


def test_the_log_of_an_earlier_run_is_kept(launched, tmp_path):
    launched("print('first')")
    launched("print('second')")
    assert (tmp_path / "run.1.log").read_text() == "first\n"
    assert (tmp_path / "run.log").read_text() == "second\n"


@pytest.mark.parametrize(
    ("checkpoint", "done", "sentence"),
    [
        (2, (1, 2, 3), "stopped by SIGTERM after step 3; the same command goes on from the checkpoint of step 2"),
        (
            None,
            (1,),
            (
                "stopped by SIGTERM after step 1; no checkpoint was saved (trainer.save_freq), so the same command "
                "starts anew"
            ),
        ),
        (None, (), "stopped by SIGTERM before its first step was done; no checkpoint was saved"),
    ],
)
def test_a_run_that_is_stopped_ends_with_a_sentence(launched, tmp_path, capfd, checkpoint, done, sentence):
    ready = tmp_path / "ready"
    # As Ray's driver ends on SIGTERM.
    program = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.abort())
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""
    if checkpoint is not None:
        (tmp_path / f"global_step_{checkpoint}").mkdir()
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(checkpoint))

    def stop() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    code = launched((logs(*((step, STEP) for step in done)) if done else "") + program)
    thread.join()
    assert code == 128 + signal.SIGTERM
    said = capfd.readouterr()
    assert said.err.strip().splitlines()[-1].startswith(f"verl-fuse: {sentence}")
    assert "134" not in said.err.replace(str(tmp_path), "")  # The status of an aborted process.
    assert "Validation" not in said.out


def test_metrics_of_the_first_part_survive_a_resume(launched, tmp_path):
    launched(logs((0, {"val": 0.1}), (1, STEP), (2, STEP), (3, {"lost": 1})))
    launched(logs((2, {"val": 0.2}), (3, STEP), (4, STEP)), resumed=2)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["data"]) for record in records] == [
        (0, {"val": 0.1}),
        (1, STEP),
        (2, STEP | {"val": 0.2}),
        (3, STEP),
        (4, STEP),
    ]
    assert '"lost"' in (tmp_path / "metrics.1.jsonl").read_text()


def test_a_refused_run_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    folder = tmp_path / "ppo-cpu"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("earlier")
    with pytest.raises(run.FuseError, match="micro_group=-1"):
        run.run("ppo-cpu", ["fuse.interstage.micro_group=-1"])
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert not (tmp_path / "tasks").exists()


def test_a_configuration_stays_with_the_metrics_that_it_belongs_to(launched, tmp_path):
    """Hydra writes the configuration of a run before its first step."""
    configures = "import pathlib; pathlib.Path('{0}/config.yaml').write_text('{1}')\n"
    assert launched(configures.format(tmp_path, "first") + logs((1, STEP))) == 0
    assert launched(configures.format(tmp_path, "second") + "raise SystemExit(3)") == 3
    assert (tmp_path / "config.yaml").read_text() == "first"
    assert '"step": 1' in (tmp_path / "metrics.jsonl").read_text()
    assert launched(configures.format(tmp_path, "third") + logs((1, STEP), (2, STEP))) == 0
    assert (tmp_path / "config.yaml").read_text() == "third"
    assert (tmp_path / "config.1.yaml").read_text() == "first"
    # One that writes none leaves the other where it is.
    assert launched("raise SystemExit(3)") == 3
    assert (tmp_path / "config.yaml").read_text() == "third"
    # One that has no metrics, and has ended well, keeps its own; so does one that wrote a page before it broke off.
    assert launched(configures.format(tmp_path, "fourth")) == 0
    assert (tmp_path / "config.yaml").read_text() == "fourth"
    assert not (tmp_path / "metrics.jsonl").exists()
    page = f"pathlib.Path('{tmp_path}/{INDEX_PAGE}').write_text('')\n"
    assert launched(configures.format(tmp_path, "fifth") + page + "raise SystemExit(3)") == 3
    assert (tmp_path / "config.yaml").read_text() == "fifth"


def test_two_runs_never_share_a_folder(launched, tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711 on elsewhere")
        lock.flush()
        with pytest.raises(FuseError, match=r"verl-fuse makes a run there already \(process 4711 on elsewhere\): wait"):
            launched("print('trained')")
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}
    assert launched("print('trained')") == 0


def test_a_signal_after_the_end_of_the_run_is_told(launched, tmp_path, capfd, signalled_twice):
    ready = tmp_path / "ready"
    outlives = f"""
import os, pathlib, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.02)
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""
    starts = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {outlives!r}, str(os.getpid())], start_new_session=True)
"""

    thread = signalled_twice(ready, signal.SIGTERM)
    assert launched(starts + logs((1, STEP))) == 128 + signal.SIGTERM
    thread.join()
    assert "verl-fuse: SIGTERM: verl had ended, or ended by itself, with exit code 0\n" in capfd.readouterr().err


def test_a_file_system_without_locks_keeps_nobody_from_training(launched, monkeypatch, capfd):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    assert launched("print('trained')") == 0
    assert "its file system has no locks (No locks available)" in capfd.readouterr().err
