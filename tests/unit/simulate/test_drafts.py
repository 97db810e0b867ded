"""Shows the invariants of `verl_fuse.simulate.drafts`."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fuse.cli.replay import recorded_acceptance
from verl_fuse.errors import FuseError
from verl_fuse.simulate.drafts import MOST_DRAFTED, acceptance_of, tokens_per_pass, with_drafts
from verl_fuse_speculation.engine import AUTO_TOKENS


def step_seconds(fixed: float, each: float):
    return lambda sequences, drafted, tokens: fixed + each * (1 + drafted) * sequences + 0.0 * tokens


def test_as_many_are_drafted_as_the_plugin_drafts():
    assert MOST_DRAFTED == AUTO_TOKENS
    assert tokens_per_pass(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_per_pass(1.0, 8) == 9


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(0.0, 1.0))
def test_no_batch_decodes_slower(fixed, each, acceptance):
    sequences = np.array([1.0, 4.0, 64.0, 512.0])
    plain = step_seconds(fixed, each)
    drafted = with_drafts(plain, acceptance)(sequences, sequences)
    assert (drafted <= plain(sequences, 0, sequences)).all()


def test_a_busy_device_drafts_nothing_and_an_idle_one_all_it_may():
    sequences = np.array([1.0, 512.0])
    plain = step_seconds(1.0, 0.01)
    drafted = with_drafts(plain, 0.8)(sequences, sequences)
    assert drafted[0] == pytest.approx((1 + 0.01 * 9) / tokens_per_pass(0.8, 8))
    busy = step_seconds(0.0, 0.01)
    drafted = with_drafts(busy, 0.8)(sequences, sequences)
    assert drafted == pytest.approx(busy(sequences, 0, sequences))


@given(st.floats(0.05, 0.98), st.floats(0.5, 8.0))
def test_the_acceptance_is_found_again(acceptance, drafted):
    tokens = tokens_per_pass(acceptance, drafted)
    assert acceptance_of(tokens, (tokens - 1) / drafted) == pytest.approx(acceptance, abs=1e-6)


def logged(folder, *steps):
    names = ("drafted_tokens", "acceptance", "tokens_per_pass")
    lines = [
        {"step": number, "data": {f"fuse/speculation_{name}": value for name, value in zip(names, step, strict=True)}}
        for number, step in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline").mkdir()


def test_the_acceptance_of_a_recorded_run_is_that_of_all_its_steps(tmp_path):
    tokens = tokens_per_pass(0.7, 4)
    logged(tmp_path, (4000.0, (tokens - 1) / 4, tokens), (400.0, (tokens - 1) / 4, tokens), (0.0, 0.0, 1.0))
    assert recorded_acceptance(tmp_path) == pytest.approx(0.7)


def test_a_run_without_drafts_says_nothing_of_them(tmp_path):
    logged(tmp_path, (0.0, 0.0, 1.0))
    with pytest.raises(FuseError, match=r"needs a run with fuse\.speculation\.enabled=true"):
        recorded_acceptance(tmp_path)
