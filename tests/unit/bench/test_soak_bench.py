import json
import subprocess
from pathlib import Path

import pytest

from ci.bench.soak import (
    PROMPTS,
    SAMPLES,
    WARM,
    Finished,
    Leg,
    accounts_wrong,
    ending,
    growth,
    last_account,
    left,
    unread,
)


def account(folder: Path, step: int, samples: int = SAMPLES, first: int | None = None) -> None:
    (folder / "accounts").mkdir(exist_ok=True)
    begun = PROMPTS * step if first is None else first
    prompts = [f"prompt {begun + number}" for number in range(PROMPTS)]
    written = {"step": step, "samples": samples, "missing": SAMPLES - samples, "groups": PROMPTS, "prompts": prompts}
    (folder / f"accounts/step_{step:06d}.json").write_text(json.dumps(written))


def test_whole_accounts_of_different_prompts_are_right(tmp_path: Path):
    for step in (1, 2, 3):
        account(tmp_path, step)
    assert list(accounts_wrong(tmp_path)) == []
    assert last_account(tmp_path) == 3


def test_a_lost_sample_a_missing_step_and_a_repeated_prompt_are_wrong(tmp_path: Path):
    account(tmp_path, 1)
    account(tmp_path, 3, samples=SAMPLES - 1)
    account(tmp_path, 4, first=2 * PROMPTS - 1)
    found = list(accounts_wrong(tmp_path))
    assert [each.split(":")[0] for each in found[:2]] == ["step 2", "step 3"]
    assert found[2:] == ["1 prompts are in two steps"]


@pytest.mark.parametrize(
    ("fault", "after", "code", "output", "words"),
    [
        ("engine", 3, 1, "FuseError: step 3: replica 1 is gone", None),
        ("engine", 3, 1, "Traceback", "did not name"),
        ("engine", 3, 0, "FuseError: replica 1", "though a process was killed"),
        ("rank", 3, 1, "ActorDiedError", None),
        ("rank", 3, 143, "", "though a process was killed"),
        ("stopped", 3, 143, "", None),
        ("slow", 3, 1, "", "told to stop"),
        ("disk", 3, 143, "", None),
        ("disk", 3, 1, "OSError: [Errno 28] No space left on device", None),
        ("disk", 3, 1, "KeyError", "did not say that the disk is full"),
        ("rank", 0, 1, "refused", "before its fault came"),
    ],
)
def test_a_leg_ends_as_its_fault_wants(fault: str, after: int, code: int, output: str, words: str | None):
    found = list(ending(Leg("ppo", fault, after), Finished(code, "", output, Path())))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_process_that_outlives_a_leg_is_found(tmp_path: Path):
    process = subprocess.Popen(
        ["cat"], env={"VERL_FUSE_HOME": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        # Its environment can be read once it runs, a moment after Popen returns.
        process.stdin.write(b"begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        (found,) = [each for each in left(tmp_path, set(Path("/dev/shm").iterdir())) if each.startswith("process")]
        assert str(process.pid) in found
    finally:
        process.kill()
        process.communicate()


def test_a_half_written_file_is_wrong(tmp_path: Path):
    account(tmp_path, 1)
    assert list(unread(tmp_path)) == []
    (tmp_path / "accounts/step_000002.json").write_text('{"step": 2, "sam')
    (found,) = unread(tmp_path)
    assert found.startswith("accounts/step_000002.json: ")


def test_growth_is_the_slope_of_what_lives_through_all_steps_after_the_first():
    steps = range(1, WARM + 6)
    found = {
        step: {"raylet": (100.0 + 3 * step, 7), **({"late": (1.0, 1)} if step > WARM + 2 else {})} for step in steps
    }
    found[1]["raylet"] = (5000.0, 900)
    assert growth(found) == {"raylet": {"mb": 3.0, "files": 0.0}}
