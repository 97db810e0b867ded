"""A GRPO run of real verl with both switches of `fuse.update`: whole accounts, verl's metrics, and no pass for old log-probs."""

from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS = 3
COMMAND = (
    *SMALL,
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "fuse.update.skip_zero_gradient=true",
    "fuse.update.skip_old_log_prob=true",
    # Nothing is left to stream.
    "fuse.interstage.enabled=true",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)


@pytest.fixture(scope="module")
def lean(verl_home: Path, forks) -> Finished:
    done = run(verl_home, "grpo-cpu", *COMMAND, name="lean", forks=forks)
    assert done.code == 0, done.output[-4000:]
    return done


def test_every_sample_is_trained_once(lean: Finished):
    assert {step: (account["samples"], account["missing"]) for step, account in lean.accounts().items()} == {
        step: (16, 0) for step in range(1, STEPS + 1)
    }


def test_steps_have_no_pass_for_old_log_probs_and_verls_metrics_of_them(lean: Finished):
    for step, metrics in lean.metrics.items():
        assert metrics["fuse/update_own_log_probs"] == 1.0
        assert metrics["fuse/update_old_log_prob_passes"] == 0.0
        assert metrics["actor/ppo_kl"] == 0.0
        assert metrics["actor/entropy"] > 0
        # The rollout's probabilities and the model's: of all samples, by the update's own passes.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-4)
        timeline = Timeline.from_json((lean.folder / f"timeline/step_{step:06d}.json").read_text())
        assert not [span for span in timeline.spans if "log_prob" in span.name and span.category == "inference"]


def test_what_was_left_out_is_said(lean: Finished):
    for step, metrics in lean.metrics.items():
        assert metrics["fuse/update_skipped_samples"] == metrics["fuse/zero_gradient_samples"]
        assert metrics["fuse/update_skipped_samples"] % 0.25 == 0, "whole groups"
        timeline = Timeline.from_json((lean.folder / f"timeline/step_{step:06d}.json").read_text())
        (update,) = [span for span in timeline.on("step") if span.name == "update_actor"]
        assert update.args["skipped_samples"] == metrics["fuse/update_skipped_samples"]
        # A step of which nothing is left has no gradient; others have one.
        assert (metrics["actor/grad_norm"] == 0) == (metrics["fuse/update_skipped_samples"] == 1)
