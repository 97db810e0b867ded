"""A real run with all that speculation meets at once: drafts of four samples a prompt on two vLLM replicas, a tail that
may migrate, log-probs from the engine, and a second run that goes on from the first one's checkpoint."""

import os
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes five minutes: VERL_FUSE_LONG=1"),
]

PROMPTS, SAMPLES = 6, 4
BEFORE, AFTER = 3, 5
# How far rollout and trainer may differ in a token's log-prob in float32, as in test_migration_run.py.
ROLLOUT_TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def resumed(verl_home) -> Finished:
    """Steps 1 to BEFORE, and the steps to AFTER by a run that goes on; every step has the same prompts."""
    for steps in (BEFORE, AFTER):
        done = run(
            verl_home,
            "grpo-cpu",
            *SMALL,
            f"data.train_max_samples={PROMPTS}",
            "data.shuffle=false",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "algorithm.rollout_correction.rollout_is=token",
            "fuse.speculation.enabled=true",
            "fuse.speculation.tokens=4",
            "fuse.interstage.enabled=true",
            "fuse.interstage.layout=slices",
            "fuse.interstage.migration_threshold=16",
            f"trainer.total_training_steps={steps}",
            f"trainer.total_epochs={steps}",
            f"trainer.save_freq={BEFORE}",
            "trainer.resume_mode=auto",
            name="speculation",
        )
        assert done.code == 0, done.output[-4000:]
    return done


def test_every_sample_is_trained_once_before_and_after_the_resume(resumed):
    accounts = resumed.accounts()
    assert sorted(accounts) == list(range(1, AFTER + 1))
    for step, account in accounts.items():
        assert (account["groups"], account["samples"], account["missing"]) == (PROMPTS, PROMPTS * SAMPLES, 0), step
        assert resumed.metrics[step]["fuse/samples_missing"] == 0


def test_log_probs_of_the_engine_are_those_of_the_trainer(resumed):
    for step in range(1, AFTER + 1):
        assert resumed.metrics[step]["training/rollout_probs_diff_max"] < ROLLOUT_TOLERANCE, step


def test_the_tail_is_drafted_for(resumed):
    """Whether it moves depends on the machine: with drafts it may end before it is looked at. A request that moved is
    drafted for in test_speculation.py."""
    steps = [resumed.metrics[step] for step in range(1, AFTER + 1)]
    assert sum(step.get("fuse/speculation_tail_drafted_tokens", 0) for step in steps) > 0
    assert all(step["fuse/restarted_requests"] == 0 for step in steps)


def test_history_survives_the_resume(resumed):
    met, again = (resumed.metrics[step]["fuse/speculation_tokens_per_pass"] for step in (1, BEFORE + 1))
    assert again > met
    assert len({path.stem for path in Path(resumed.folder, "speculation").glob("*.passes")}) == 4


def test_no_drafter_failed_or_was_not_heard_of(resumed):
    assert "drafting failed" not in resumed.output
    assert "left nothing in" not in resumed.output
