"""Drafts from history in a real vLLM engine: fewer passes, and log-probs as transformers computes them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_runs import SUPPORT, make_task

from verl_fuse_speculation.passes import Passes

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def done(verl_home, folder) -> dict[str, Any]:
    """Three steps of 16 prompts with 8 samples each, and then the halves of the last step's samples gone on with."""
    make_task(verl_home, "ppo-cpu")
    task = verl_home / "tasks/euclid"
    asked = {
        "model": str(task / "model"),
        "data": str(task / "train.parquet"),
        "prompts": 16,
        "samples": 8,
        "steps": STEPS,
        "temperature": 0.7,
        "kernel": True,
        "by_request": True,
        "speculation": {"tokens": 8, "history_bytes": 1 << 24, "epochs": 2, "folder": str(folder)},
    }
    command = [sys.executable, str(SUPPORT / "speculating_engine.py"), json.dumps(asked)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_drafted_positions_get_the_temperature_and_the_cut_of_their_request(done):
    no = -math.inf
    assert done["kernel"]["patched"] == [[2.0, 4.0, 6.0]] * 2 + [[no, 1.0, 1.5]] * 3
    # Without the patch: temperatures are left-over memory.
    assert done["kernel"]["shipped"] != [[2.0, 4.0, 6.0]] * 2 + [[0.5, 1.0, 1.5]] * 3


def test_rounded_numbers_of_rows_are_multiplied_as_torch_does(done):
    assert done["multiplied"] < 1e-4


def test_log_probs_are_those_of_transformers_also_of_samples_that_go_on_elsewhere(done):
    assert done["difference"] < 1e-4
    assert done["moved_difference"] < 1e-4


# The drafts of this request: none, or some in this test, of which several are accepted in a pass.
WITHOUT_DRAFTS = {"seed"}


def test_what_a_single_request_asks_for_holds_with_drafts_as_without(done):
    for name, found in done["by_request"].items():
        assert found["same"], name
        assert found["difference"] < 1e-4, name
        # It does ask for something else than the others.
        assert found["changed"], name
        assert (found["tokens_per_pass"] > 1.1) == (name not in WITHOUT_DRAFTS), name
    assert done["by_request"]["stop"]["ended_by_text"]
    assert done["by_request"]["stop, kept in the text, not at once"]["ended_by_text"]


def test_vllm_finds_what_it_compiled_in_a_run_with_another_directory(done):
    assert not done["hash_is_of_one_run"]


def test_every_step_takes_fewer_passes_than_its_longest_sample_has_tokens(done):
    longest = [max(lengths) for lengths in done["lengths"]]
    assert all(passes < most for passes, most in zip(done["passes"], longest, strict=True))
    assert sum(done["passes"][1:]) < 0.7 * sum(longest[1:])


def test_the_account_of_the_passes_is_whole(done, folder):
    (passes,) = Passes(folder).news().values()
    for step, lengths in enumerate(done["lengths"], 1):
        here = passes[passes["step"] == step]
        # vLLM's sampler may go on after an end that was accepted; what it finds there is dropped.
        assert sum(lengths) <= here["tokens"].sum() <= sum(lengths) + len(lengths)
        assert len(here) >= done["passes"][step - 1] - 1
        assert 0 < here["tokens"].sum() - here["rows"].sum() <= here["drafted"].sum()
