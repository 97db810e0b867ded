"""Trials of `verl-fuse tune`: what each is told, and what becomes of programs in verl's place."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_fuse.cli import child, trials
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import METRICS_PATH_VARIABLE, PlannedRun
from verl_fuse.cli.trials import forget_rollouts, forget_trials, has_recorded, made, make_task, outcome, planned
from verl_fuse.cli.tuned import base_of_recipe
from verl_fuse.errors import FuseError
from verl_fuse.tune.search import Request
from verl_fuse.tune.trial import Outcome

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

RAY = "\x1b[36m(WorkerDict pid=7)\x1b[0m "
STEPS = [{"timing_s/step": 9.0}, {"timing_s/step": 2.0}, {"timing_s/step": 4.0}]
PEAKS = [{**step, "actor/perf/max_memory_reserved_gb": 1.5, "perf/max_memory_reserved_gb": 0.5} for step in STEPS]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a program in verl's place: what became of it."""
    monkeypatch.setattr(child, "TERMINATE_SECONDS", 0.3)

    def tried(program: str, *, limit: float = 60.0, prepare: str | None = None) -> Outcome:
        task = None if prepare is None else (sys.executable, "-c", prepare)
        variables = {METRICS_PATH_VARIABLE: str(tmp_path / "metrics.jsonl")}
        return outcome(PlannedRun(task, (sys.executable, "-c", program), variables, (), tmp_path), limit)

    return tried


def logs(*steps: dict) -> str:
    lines = "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in enumerate(steps, start=1))
    return f"import os; open(os.environ[{METRICS_PATH_VARIABLE!r}], 'w').write({lines!r})\n"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_steps_after_the_first_are_measured(tried, capfd):
    assert tried(f"print({RAY!r} + 'noise')\n" + logs(*STEPS)) == Outcome("measured", (2.0, 4.0))
    assert capfd.readouterr() == ("", "")


def test_lengths_are_those_of_the_counted_steps_and_none_where_one_lacks_them(tried):
    lengths = [{"response_length/mean": 10.0 + step, "response_length/max": 90 + step} for step in range(3)]
    steps = [{**one, **two} for one, two in zip(STEPS, lengths, strict=True)]
    assert tried(logs(*steps)).lengths == ((11.0, 91), (12.0, 92))
    assert tried(logs(*steps[:2], STEPS[2])).lengths == ()
    assert tried(logs(*steps[:2], {**steps[2], "response_length/mean": 0.0})).lengths == ()


def test_the_largest_peak_of_all_roles_counts_and_none_of_a_host(tried):
    assert tried(logs(*PEAKS)).peak_bytes == 3 * 2**29
    assert tried(logs(*({**step, "perf/max_memory_reserved_gb": 0.0} for step in STEPS))).peak_bytes is None


@pytest.mark.parametrize(
    ("program", "kind", "reason"),
    [
        ("raise ValueError('too large:\\n  - by one')", "crashed", "ValueError: too large:"),
        ("raise SystemExit(3)", "crashed", "exit code 3"),
        ("print('last words'); raise SystemExit(3)", "crashed", "last words"),
        ("import os; os.abort()", "crashed", "exit code 134"),
        (
            f"print({RAY!r} + 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'); raise ValueError",
            "out_of_memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            f"print({RAY!r} + 'ValueError: No available memory for the cache blocks.'); raise RuntimeError('engine')",
            "out_of_memory",
            "ValueError: No available memory for the cache blocks.",
        ),
        (
            f"print({RAY!r} + 'ray.exceptions.OutOfMemoryError: 14 worker(s) were killed due to the node running low '"
            "'on memory.'); raise ValueError",
            "out_of_memory",
            "ray.exceptions.OutOfMemoryError: 14 worker(s) were killed due to the node running low on memory.",
        ),
        ("import os; os.kill(os.getpid(), 9)", "out_of_memory", "exit code 137"),
        (logs(STEPS[0]), "crashed", "ended after 1 steps: needs more than the 1 of warm-up"),
        ("pass", "crashed", "ended after 0 steps: needs more than the 1 of warm-up"),
    ],
)
def test_a_failure_has_its_kind_and_a_reason(tried, program: str, kind: str, reason: str):
    assert tried(program) == Outcome(kind, reason=reason)


def test_a_task_that_cannot_be_made_is_a_failure(tried):
    assert tried(logs(*STEPS), prepare="raise OSError('no disk')") == Outcome("crashed", reason="OSError: no disk")


def test_the_task_is_made_before_the_first_trial(tmp_path: Path):
    def launch(program: str) -> PlannedRun:
        variables = {METRICS_PATH_VARIABLE: str(tmp_path / "metrics.jsonl")}
        return PlannedRun((sys.executable, "-c", program), ("no such program",), variables, (), tmp_path / "trial-01")

    make_task(launch(f"open({str(tmp_path / 'task')!r}, 'w').close()"))
    assert (tmp_path / "task").exists()
    assert not (tmp_path / "trial-01" / "run.log").exists(), "a trial's log is the trial's"
    with pytest.raises(
        FuseError, match=r"making the task ended with exit code 1: OSError: no disk \(log: .*/task\.log\)"
    ):
        make_task(launch("raise OSError('no disk')"))


def test_metrics_of_an_earlier_trial_in_the_folder_do_not_count(tried, tmp_path):
    tried(logs(*STEPS))
    assert tried("pass").kind == "crashed"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_one_that_hangs_is_ended_with_all_that_it_started(tried, tmp_path):
    pid_file = tmp_path / "pid"
    program = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({str(pid_file)!r}).write_text(str(other.pid))
print("at work", flush=True)
time.sleep(600)
"""
    # Long enough for the program to start on a machine that is busy.
    found = tried(program, limit=10.0)
    assert found == Outcome("hung", reason="not done after 10 s; at work")
    # A process that was killed may take a moment to end, and nobody may have collected it yet.
    deadline = time.monotonic() + 60
    while runs(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("part", ["task", "training"])
def test_a_trial_that_is_told_to_stop_is_no_outcome(tried, tmp_path, part: str):
    ready = tmp_path / "ready"
    waits = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tried(waits, prepare=waits if part == "task" else None)
    thread.join()


def asked(*overrides: str, steps: int = 3, replayed: bool = False, records: bool = False) -> Request:
    return Request(overrides, steps, 60.0, replayed, records)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("hydra")
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    return tmp_path


def test_a_trial_saves_validates_and_resumes_nothing_in_a_folder_of_its_own(home):
    # What a user's run does counts for nothing here; neither do features that a recipe has on.
    given = (
        "trainer.save_freq=1",
        "trainer.default_local_dir=/mine",
        "trainer.total_training_steps=99",
        "actor_rollout_ref.rollout.trace.backend=mlflow",
        "global_profiler.steps=[1]",
        "ray_kwargs.timeline_json_file=/mine/ray.json",
        "trainer.critic_warmup=20",
    )
    base = base_of_recipe(find_recipe("dapo-cpu"), (*given, "data.seed=7"))
    launch = planned(base, home, 3, asked("data.seed=8", steps=4))
    assert launch.run_dir == home / "dapo-cpu-tune" / "trial-03"
    trainer, fuse = launch.config.trainer, launch.config.fuse
    assert (trainer.save_freq, trainer.test_freq, trainer.val_before_train) == (-1, -1, False)
    assert (trainer.resume_mode, trainer.logger, trainer.total_training_steps) == ("disable", ["file"], 5)
    assert (trainer.v1.trainer_mode, fuse.preset, fuse.interstage.enabled) == ("fuse", "observe", False)
    assert launch.config.actor_rollout_ref.rollout.trace.backend is None
    assert (launch.config.global_profiler.steps, launch.config.ray_kwargs.timeline_json_file) == (None, None)
    assert launch.config.data.seed == 8
    assert trainer.critic_warmup == 0, "the actor is updated in every step"
    assert not launch.config.skip.rollout_tq.enable
    assert list(home.iterdir()) == []


def test_a_trial_records_what_others_replay(home):
    base = base_of_recipe(find_recipe("grpo-cpu"), ())
    first, replay = (
        planned(base, home, *each).config for each in ((1, asked(records=True)), (4, asked(steps=6, replayed=True)))
    )
    assert (first.skip.rollout_tq.enable, first.skip.rollout_tq.action) == (True, "cache")
    assert (replay.skip.rollout_tq.enable, replay.skip.rollout_tq.action) == (True, "repeat")
    assert (first.skip.rollout_tq.steps, replay.skip.rollout_tq.steps) == ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7])
    # verl looks for them below the folder by these names.
    for config in (first, replay):
        assert config.skip.rollout_tq.dump_dir == str(home / "grpo-cpu-tune" / "rollouts")
        assert config.trainer.experiment_name == "grpo-cpu-tune"
    assert first.trainer.default_local_dir != replay.trainer.default_local_dir


def test_rollouts_are_replayed_only_where_all_steps_were_recorded_in_this_search(home):
    base = base_of_recipe(find_recipe("grpo-cpu"), ())
    assert not has_recorded(base, home, 2)
    forget_rollouts(base, home)
    for step in (1, 2, 3):
        assert not has_recorded(base, home, 2)
        folder = home / f"grpo-cpu-tune/rollouts/grpo-cpu-tune_verl-fuse/GBS8_N8_in16_out240/{step}/0"
        folder.mkdir(parents=True)
        (folder / "tq_batch.pt").touch()
        # verl may have ended before it had written all.
        assert not has_recorded(base, home, 2)
        (folder / "meta.json").touch()
    assert has_recorded(base, home, 2)
    forget_rollouts(base, home)
    assert not has_recorded(base, home, 2)
    assert list((home / "grpo-cpu-tune").iterdir()) == []


def test_groups_that_are_filtered_and_sampled_anew_are_not_recorded(home):
    base = base_of_recipe(find_recipe("grpo-cpu"), ("algorithm.filter_groups.enable=true",))
    assert not planned(base, home, 1, asked(records=True)).config.skip.rollout_tq.enable


def test_what_recording_took_is_in_no_seconds_of_a_trial_that_records(home, monkeypatch):
    base = base_of_recipe(find_recipe("grpo-cpu"), ())

    def outcome(launch: PlannedRun, limit: float) -> Outcome:
        if not launch.config.skip.rollout_tq.enable:
            return Outcome("measured", (2.0, 3.0))
        assert not has_recorded(base, home, 1), "verl would replay them"
        # The step of warm-up, and a second one; the third was not recorded.
        for step, seconds in ((1, 5.0), (2, 0.75)):
            folder = home / f"grpo-cpu-tune/rollouts/grpo-cpu-tune_verl-fuse/GBS8_N8_in16_out240/{step}/0"
            folder.mkdir(parents=True, exist_ok=True)
            for name, end in (("tq_batch.pt", seconds / 2), ("meta.json", seconds)):
                (folder / name).touch()
                os.utime(folder / name, (100.0 + end, 100.0 + end))
            os.utime(folder.parent, (100.0, 100.0))
        return Outcome("measured", (2.0, 3.0))

    monkeypatch.setattr(trials, "outcome", outcome)
    assert made(base, home, 1, asked(steps=2, records=True)).seconds == (1.25, 3.0)
    assert has_recorded(base, home, 1)
    assert made(base, home, 2, asked(steps=2)).seconds == (2.0, 3.0)
    assert made(base, home, 3, asked(steps=2, records=True)).seconds == (1.25, 3.0)


def test_a_base_that_ends_while_it_records_is_a_failure(home, monkeypatch):
    def outcome(launch: PlannedRun, limit: float) -> Outcome:
        folder = home / "grpo-cpu-tune/rollouts/grpo-cpu-tune_verl-fuse/GBS8_N8_in16_out240/2/0"
        folder.mkdir(parents=True)
        (folder / "tq_batch.pt").touch()
        return Outcome("out_of_memory", reason="so")

    monkeypatch.setattr(trials, "outcome", outcome)
    assert (
        made(base_of_recipe(find_recipe("grpo-cpu"), ()), home, 1, asked(steps=2, records=True)).kind == "out_of_memory"
    )


def test_a_trial_whose_disk_is_full_is_a_failure(home, monkeypatch):
    def outcome(launch: PlannedRun, limit: float) -> Outcome:
        raise OSError(28, "No space left on device", str(launch.log))

    monkeypatch.setattr(trials, "outcome", outcome)
    found = made(base_of_recipe(find_recipe("grpo-cpu"), ()), home, 2, asked())
    assert found == Outcome("crashed", reason=f"{home}/grpo-cpu-tune/trial-02/run.log: No space left on device")


def test_trials_of_an_earlier_search_are_removed_and_nothing_else(home):
    base = base_of_recipe(find_recipe("grpo-cpu"), ())
    folder = home / "grpo-cpu-tune"
    forget_trials(base, home)
    for name in ("trial-01/timeline", "trial-12", "trial-of-mine"):
        (folder / name).mkdir(parents=True)
    (folder / "profile.json").touch()
    forget_trials(base, home)
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "trial-of-mine"]


def test_a_replay_that_finds_no_rollout_and_generates_is_refused(home, monkeypatch):
    base, records = base_of_recipe(find_recipe("grpo-cpu"), ()), False

    def outcome(launch: PlannedRun, limit: float) -> Outcome:
        for step in (1, 2, 3) if records else ():
            folder = home / f"grpo-cpu-tune/rollouts/grpo-cpu-tune_verl-fuse/GBS8_N8_in16_out240/{step}/0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tq_batch.pt").touch()
            (folder / "meta.json").touch()
        return Outcome("measured", (2.0, 3.0))

    monkeypatch.setattr(trials, "outcome", outcome)
    assert made(base, home, 2, asked(steps=2, replayed=True)).kind == "measured"
    records = True
    found = made(base, home, 3, asked(steps=2, replayed=True))
    assert found.kind == "refused"
    assert found.reason == f"{home}/grpo-cpu-tune/rollouts: verl found no recorded rollout there, and generated"
    # What it recorded is not the base's.
    assert not has_recorded(base, home, 2)


def test_no_trial_makes_the_task_again(home, monkeypatch):
    launches = []
    monkeypatch.setattr(
        trials, "outcome", lambda launch, limit: launches.append(launch) or Outcome("crashed", reason="so")
    )
    # The second recipe has no task, and no key for one.
    for name, makes in (("grpo-cpu", True), ("grpo-gsm8k-8gpu", False)):
        base = base_of_recipe(find_recipe(name), ())
        assert bool(planned(base, home, 1, asked()).prepare) == makes
        for number in (1, 2):
            made(base, home, number, asked())
    assert [launch.prepare for launch in launches] == [None] * 4


def test_what_the_plan_refuses_is_an_outcome(home, monkeypatch):
    monkeypatch.setattr(trials, "outcome", lambda launch, limit: pytest.fail(f"{launch} was started"))
    found = made(base_of_recipe(find_recipe("grpo-cpu"), ()), home, 2, asked("data.nosuch=1"))
    assert found.kind == "refused"
    assert "there is no key data.nosuch" in (found.reason or "")
