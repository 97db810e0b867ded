"""One of each kind of the three hundred fault schedules of `python -m ci.bench.faults`: trainer, agent loop, replay
buffer, load balancer and TransferQueue are real, the engine counts (support/schedule_runs.py)."""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.fault_schedules import ACTIONS, KINDS, LONG, PROMPTS, REPLICAS, SAMPLES_PER_PROMPT, schedule
from support.fork_server import SITE

pytestmark = [
    pytest.mark.integration,
    # Importing verl takes seconds, and only the other process needs it.
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed"),
]

SCHEDULES = len(KINDS)
NEVER = ("lost", "duplicated", "wrong_weights", "hung", "other_faults")


def test_no_schedule_loses_or_doubles_a_sample_or_trains_under_other_weights_or_hangs(
    repo: Path, forks: dict[str, str]
):
    command = [sys.executable, "-m", "ci.bench.faults", "--schedules", str(SCHEDULES)]
    environment = {**os.environ, **forks, "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in NEVER} == dict.fromkeys(NEVER, 0), done.stderr[-3000:]
    assert done.returncode == 0
    assert sum(found["kinds"].values()) == SCHEDULES
    assert set(found["kinds"].values()) == {1}
    assert found["requests_moved"] > 0, "faults met migrating steps"
    assert found["ended_loudly"] > 0, "a dead replica ends the run"
    assert found["samples_trained"] + found["rollouts_failed"] >= SCHEDULES * PROMPTS * SAMPLES_PER_PROMPT // 2


def test_a_schedule_is_what_its_kind_says():
    schedules = [schedule(seed) for seed in range(300)]
    assert min(Counter(one.kind for one in schedules).values()) == 25
    for one in schedules:
        lengths = [length for group in one.lengths for length in group]
        assert len(lengths) == PROMPTS * SAMPLES_PER_PROMPT
        assert bool(one.faults) == (one.kind in ACTIONS)
        assert all(fault.replica in range(REPLICAS) for fault in one.faults)
        assert one.kind != "all long" or set(lengths) == {LONG}
        assert one.kind != "all short" or max(lengths) <= 2
        assert (0 in lengths) == (one.kind == "empty batch")
    assert len(set(KINDS)) == len(KINDS)
    assert any(not one.asked for one in schedules)
    assert len({fault.replica for one in schedules if one.kind == "two kills" for fault in one.faults}) == REPLICAS
