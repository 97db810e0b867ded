"""A GRPO run of real verl with four switches of `fuse.update` and two mini-batches a step: whole accounts, verl's
metrics, and old log-probs of the first mini-batch from its update once the actor is trained."""

import os
from itertools import combinations
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Span, Timeline

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS = 3
# The first step trains no actor.
TRAINED = (2, 3)
COMMAND = (
    *SMALL,
    "trainer.critic_warmup=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # Nothing is left to stream.
    "fuse.interstage.enabled=true",
)
SWITCHES = tuple(
    f"fuse.update.{key}=true" for key in ("skip_zero_gradient", "skip_old_log_prob", "response_logits", "share_prompts")
)
# After the last step there is a checkpoint.
LEAN = (*SWITCHES, f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", "trainer.resume_mode=disable")


LONG = pytest.mark.skipif(not os.environ.get("VERL_FUSE_LONG"), reason="VERL_FUSE_LONG is not set")


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("fsdp", marks=LONG)])
def strategy(request: pytest.FixtureRequest) -> str:
    return f"actor_rollout_ref.actor.strategy={request.param}"


@pytest.fixture(scope="module")
def lean(verl_home: Path, forks, strategy: str) -> Finished:
    done = run(verl_home, "grpo-cpu", *COMMAND, *LEAN, strategy, name=f"lean_{strategy.partition('=')[2]}", forks=forks)
    assert done.code == 0, done.output[-4000:]
    return done


def test_every_sample_is_trained_once(lean: Finished):
    assert {step: (account["samples"], account["missing"]) for step, account in lean.accounts().items()} == {
        step: (16, 0) for step in range(1, STEPS + 1)
    }


def passes(finished: Finished, step: int) -> list[Span]:
    """Return the calls that the step made for old log-probs."""
    return [span for span in timeline(finished, step).spans if "log_prob" in span.name and span.category == "inference"]


def timeline(finished: Finished, step: int) -> Timeline:
    return Timeline.from_json((finished.folder / f"timeline/step_{step:06d}.json").read_text())


def test_while_the_actor_is_not_trained_verls_pass_is_run_and_counted(lean: Finished):
    assert passes(lean, 1)
    assert lean.metrics[1]["actor/entropy"] > 0
    assert lean.metrics[1]["training/rollout_probs_diff_max"] < 1e-3
    assert not {"actor/grad_norm", "fuse/update_own_log_probs"} & lean.metrics[1].keys()
    assert lean.metrics[2]["fuse/update_old_log_prob_passes"] == 1.0


def test_the_pass_has_the_other_mini_batch_alone_and_metrics_are_of_all_samples(lean: Finished):
    for step in TRAINED:
        metrics, spans = lean.metrics[step], timeline(lean, step)
        tokens = [
            span.args["prompt_tokens"] + span.args["response_tokens"] for span in spans.spans if span.name == "request"
        ]
        shares = [sum(chosen) / sum(tokens) for chosen in combinations(tokens, len(tokens) // 2)]
        share = metrics["fuse/update_own_log_probs"]
        assert 0 < share < 1
        assert min(abs(share - one) for one in shares) < 1e-6, "half of the samples"
        # The other mini-batch is trained after the first has moved the weights.
        assert abs(metrics["actor/ppo_kl"]) < 0.05
        assert metrics["actor/entropy"] > 0
        # The rollout's probabilities and the model's, of the update's own passes and of verl's.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-4)
        (old,) = [span for span in spans.on("step") if span.name == "old_log_prob"]
        (advantages, update) = (
            next(span for span in spans.on("step") if span.name == name) for name in ("adv", "update_actor")
        )
        assert advantages.end <= old.start
        assert old.end <= update.start
        assert passes(lean, step)


def test_prompts_are_computed_once_in_passes_and_updates(lean: Finished):
    # A rank has eight samples of the whole batch's four prompts.
    assert lean.metrics[1]["fuse/old_log_prob_shared_tokens"] > 0
    for step, metrics in lean.metrics.items():
        # Of four samples one computes the prompt, at best.
        assert 0 <= metrics["fuse/old_log_prob_shared_tokens"] <= 0.75
        assert ("fuse/update_shared_tokens" in metrics) == (step in TRAINED)
        assert 0 <= metrics.get("fuse/update_shared_tokens", 0) <= 0.75
        assert "fuse/ref_shared_tokens" not in metrics


def test_what_was_left_out_is_said(lean: Finished):
    for step in TRAINED:
        metrics = lean.metrics[step]
        assert metrics["fuse/update_skipped_samples"] == metrics["fuse/zero_gradient_samples"]
        assert metrics["fuse/update_skipped_samples"] % 0.25 == 0, "whole groups"
        (update,) = [span for span in timeline(lean, step).on("step") if span.name == "update_actor"]
        assert update.args["skipped_samples"] == metrics["fuse/update_skipped_samples"]
        # A step of which nothing is left has no gradient; others have one.
        assert (metrics["actor/grad_norm"] == 0) == (metrics["fuse/update_skipped_samples"] == 1)


@LONG
def test_verls_own_update_goes_on_from_its_checkpoint(verl_home: Path, lean: Finished, forks, strategy: str):
    last = lean.folder / f"global_step_{STEPS}"
    from_it = (f"trainer.total_training_steps={STEPS + 1}", "trainer.save_freq=-1", "trainer.resume_mode=resume_path")
    done = run(
        verl_home,
        "grpo-cpu",
        *COMMAND,
        *from_it,
        strategy,
        f"trainer.resume_from_path={last}",
        name=f"after_{lean.folder.name}",
        forks=forks,
    )
    assert done.code == 0, done.output[-4000:]
    assert sorted(done.metrics) == [STEPS + 1]
    metrics = done.metrics[STEPS + 1]
    assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert "actor/grad_norm" in metrics
    assert "fuse/update_skipped_samples" not in metrics
