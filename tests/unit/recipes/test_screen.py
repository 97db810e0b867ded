"""Which lines of a run are shown."""

import importlib.util
from pathlib import Path

import pytest

from verl_fuse.cli.crash import cause
from verl_fuse.cli.screen import PHASES, TOTAL, Screen, clock, last_lines

SOURCE = "\x1b[36m(TaskRunnerV1 pid=18837)\x1b[0m "
LOGGED = "2026-11-23 05:39:57,444:"


def shown(*lines: str) -> list[str]:
    screen = Screen()
    return [found for line in lines if (found := screen.shows(line)) is not None]


def test_own_lines_are_shown_without_their_source_and_one_a_step():
    assert shown(
        f"{SOURCE}verl-fuse: step 3/25 at 10 s, generating: 2/16 groups generated",
        f"{SOURCE}verl-fuse: step 3/25 done in 5.2 s: 16/16 groups trained, ETA 1 min 50 s",
        f"{SOURCE}step:3 - critic/score/mean:0.2 - timing_s/step:5.2 - perf/x:1",
        "verl-fuse: warning: fuse.elastic.scale=true: no effect",
        f"{SOURCE}verl-fuse: timeline of every step: /runs/timeline.html",
    ) == [
        "verl-fuse: step 3/25 done in 5.2 s: 16/16 groups trained, ETA 1 min 50 s",
        "verl-fuse: warning: fuse.elastic.scale=true: no effect",
    ]


def test_warnings_and_errors_that_are_ours_are_shown_with_their_lists():
    assert shown(
        f"{SOURCE}WARNING:{LOGGED}verl-fuse: upstream code has changed:",
        f"{SOURCE}  - verl.a:b",
        "(WorkerDict pid=3)   - of another process",
        f"{SOURCE}INFO:{LOGGED}verl-fuse: elastic: 2 replicas",
        f"{SOURCE}  - of what is not shown",
        f"{SOURCE}WARNING:{LOGGED}of verl",
        f"{SOURCE}ERROR:{LOGGED}verl-fuse: replica 1 is dead",
    ) == [
        "verl-fuse: warning: upstream code has changed:",
        "  - verl.a:b",
        "verl-fuse: error: replica 1 is dead",
    ]


def test_steps_of_stock_verl_have_a_line_with_the_time_left():
    assert shown(
        f"{SOURCE}INFO:{LOGGED}Total training steps: 3",
        *(
            f"{SOURCE}step:{step} - timing_s/gen:1.0 - timing_s/step:{seconds} - x:1"
            for step, seconds in ((1, 9), (2, 4.04), (3, 5))
        ),
    ) == [
        "verl-fuse: step 1/3 done in 9.0 s, ETA 18 s",
        "verl-fuse: step 2/3 done in 4.0 s, ETA 7 s",
        "verl-fuse: step 3/3 done in 5.0 s, last step",
    ]


def test_each_phase_is_shown_once_and_verl_still_prints_its_text():
    folder = importlib.util.find_spec("verl")
    if folder is None or not folder.submodule_search_locations:
        pytest.skip("needs verl")
    trainer = Path(next(iter(folder.submodule_search_locations))) / "trainer"
    sources = (trainer / "main_ppo.py").read_text() + (trainer / "ppo/v1/trainer_base.py").read_text()
    assert [text for text in (*PHASES, TOTAL) if text not in sources] == []
    lines = [f"INFO:{LOGGED}{text} and more" for text in PHASES]
    assert shown(*lines, *lines) == [f"verl-fuse: {phase}" for phase in PHASES.values()]


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7 s"), (185, "3:05"), (7385, "2:03:05")])
def test_times(seconds, text):
    assert clock(seconds) == text


RAY = """\
(WorkerDict pid=3) Traceback (most recent call last):
(WorkerDict pid=3) KeyError: 'inner'
Error executing job with overrides: ['a=1']
Traceback (most recent call last):
  File "main_ppo.py", line 84, in run_ppo
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(FuseError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=7)
  File "trainer.py", line 1
verl_fuse.errors.FuseError: step 3 waits for replica 1
  - it has 4 requests

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
(WorkerDict pid=3) RuntimeError: printed while it went down
"""


def test_the_cause_of_a_crash_is_the_last_error_of_the_driver(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(RAY)
    assert cause(log) == "verl_fuse.errors.FuseError: step 3 waits for replica 1\n  - it has 4 requests"
    log.write_text("(WorkerDict pid=3) Traceback (most recent call last):\n(WorkerDict pid=3) KeyError: 'inner'\nend\n")
    assert cause(log) == "KeyError: 'inner'\nend"
    log.write_text("Killed\nRuntimeErrors happen: no traceback\n")
    assert cause(log) is None


def test_the_last_lines_are_those_that_say_something(tmp_path):
    log = tmp_path / "run.log"
    log.write_bytes(b"a\n" * 100000 + b"\x1b[31mb\x1b[0m\n\n  \nc")
    assert list(last_lines(log, 3)) == ["a", "b", "c"]
