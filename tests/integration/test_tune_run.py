"""`verl-fuse tune` on real verl, from padded micro-batches of one row: trials, finals, and what is left afterwards."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support.fork_server import SITE
from verl_runs import SMALL, make_task

from verl_fuse.cli.report import read_metrics
from verl_fuse.spec.run_config import find_config

pytest.importorskip("verl")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes five minutes: VERL_FUSE_LONG=1"),
]

ACTOR, ROLLOUT, REFERENCE = (f"actor_rollout_ref.{block}" for block in ("actor", "rollout", "ref"))
PACKED, STEPS = f"{ACTOR}.use_dynamic_bsz", 3
START = (
    *SMALL,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{REFERENCE}.log_prob_micro_batch_size_per_gpu=1",
)
CHANGE = [f"{PACKED}=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"]
COMMAND = ("tune", "grpo-cpu", *START, "recipe.prepare=null", "--keys", PACKED, "--steps", str(STEPS), "--json")
MARK = "TUNE_TEST"


def left_over(value: str) -> list[str]:
    """Return the command lines of living processes with the test's mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_padded_rows_one_by_one_are_packed_if_that_is_faster_and_nothing_is_left(verl_home: Path, forks):
    make_task(verl_home, "grpo-cpu")
    own = verl_home / "grpo-cpu" / "metrics.jsonl"
    own.parent.mkdir(exist_ok=True)
    own.write_text("of a run made before")
    before = {path: path.stat().st_mtime_ns for path in [own.parent, *own.parent.rglob("*")]}
    mark = uuid.uuid4().hex
    python_path = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **forks, "VERL_FUSE_HOME": str(verl_home), "PYTHONPATH": python_path, MARK: mark}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("verl-fuse")), *COMMAND],
        env=environment,
        cwd=verl_home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)

    folder = verl_home / "grpo-cpu-tune"
    assert [(each["overrides"], each["replayed"]) for each in found["trials"][:3]] == [
        ([], False),
        ([], True),
        (CHANGE, True),
    ]
    assert all(each["outcome"] == "measured" and each["seconds"] > 0 for each in found["trials"])
    lengths, recorded = {}, []
    for number, trial in enumerate(found["trials"], start=1):
        config = find_config(folder / f"trial-{number:02d}")
        assert config.actor_rollout_ref.actor.use_dynamic_bsz == bool(trial["overrides"])
        records = [
            data for _, data in read_metrics(folder / f"trial-{number:02d}/metrics.jsonl") if "timing_s/step" in data
        ]
        counted = [data["timing_s/step"] for data in records[1:]]
        assert len(counted) == STEPS if number < 4 else 2 * STEPS <= len(counted) <= 4 * STEPS
        mean = sum(counted) / len(counted)
        # The base is recorded first and, longer, for the finals: what recording took is left out.
        records_own = not trial["replayed"] and not trial["overrides"]
        assert 0.5 * mean < trial["seconds"] < mean if records_own else trial["seconds"] == pytest.approx(mean)
        # In observe mode, which streams nothing.
        assert "fuse/step_seconds" in records[0]
        assert not any(data.get("fuse/overlap_seconds") for data in records)
        assert not list((folder / f"trial-{number:02d}").glob("global_step_*"))
        lengths[number] = [data["response_length/mean"] for data in records]
        if records_own:
            recorded = lengths[number]
        if trial["replayed"]:
            # The responses that were recorded last, step by step; one of more steps repeats the last.
            assert lengths[number] == pytest.approx(recorded + recorded[-1:] * (len(records) - len(recorded)))
    # Whether packing is faster depends on the machine: where it is, both replay longer recordings of the base in both
    # turns, and where that is in doubt the first recording with more steps before.
    pairs = [(each["overrides"], each["replayed"]) for each in found["trials"][3:]]
    finals = [([], False), *((overrides, True) for overrides in ([], CHANGE, CHANGE, []))]
    assert pairs in ([], finals, again := [([], True), (CHANGE, True)], [*again, *finals])
    if found["trials"][2]["seconds"] <= 0.98 * found["trials"][1]["seconds"]:
        assert pairs
    assert found["best"]["overrides"] in ([], CHANGE)
    if found["best"]["overrides"]:
        assert found["best"]["ratio_interval"][0] > 1
    assert not (folder / "rollouts").exists()

    assert {path: path.stat().st_mtime_ns for path in [own.parent, *own.parent.rglob("*")]} == before
    assert left_over(mark) == []
