"""The recipe grpo-tools-cpu on real verl: an agent that calls a calculator over several turns, with slices, a tail that
moves, and groups on one replica."""

from collections import defaultdict
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Span, Timeline

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS, PROMPTS, PER_PROMPT = 3, 6, 4
SAMPLES = PROMPTS * PER_PROMPT
COMMAND = (
    *SMALL,
    f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "fuse.interstage.migration_threshold=12",
    "trainer.save_freq=-1",
)


@pytest.fixture(scope="module")
def finished(verl_home, forks) -> Finished:
    done = run(verl_home, "grpo-tools-cpu", *COMMAND, name="tools", forks=forks)
    assert done.code == 0, done.output[-4000:]
    return done


def timeline(done: Finished, step: int) -> Timeline:
    return Timeline.from_json((Path(done.folder) / f"timeline/step_{step:06d}.json").read_text())


def turns(done: Finished, step: int) -> dict[str, list[Span]]:
    """The requests of each prompt, in the order in which they were sent."""
    found = defaultdict(list)
    for span in sorted(timeline(done, step).spans, key=lambda span: span.start):
        if span.name == "request":
            found[span.args["prompt"]].append(span)
    return found


def test_every_sample_of_several_turns_is_trained_once(finished):
    accounts = finished.accounts()
    assert sorted(accounts) == list(range(1, STEPS + 1))
    for step, account in accounts.items():
        assert (account["samples"], account["missing"], account["groups"]) == (SAMPLES, 0, PROMPTS)
        metrics = finished.metrics[step]
        assert metrics["num_turns/max"] > 4, "a user, an assistant, a tool, an assistant"
        assert metrics["fuse/requests"] > SAMPLES, "a turn is a request"
        assert metrics["fuse/fallbacks"] == 0


def test_all_turns_of_a_prompt_go_where_it_was_assigned_unless_its_replica_was_freed(finished):
    for step in finished.accounts():
        freed = [span.start for span in timeline(finished, step).spans if span.name == "migrate"]
        moved = min(freed, default=float("inf"))
        # A request that has begun may have no replica yet.
        tracks = {
            prompt: {span.track for span in spans if span.end < moved}
            for prompt, spans in turns(finished, step).items()
        }
        assert {len(found) for found in tracks.values()} <= {0, 1}, f"step {step}"
        assert sum(map(len, tracks.values())) > PROMPTS / 2, "most prompts have a turn that ended before"


def test_a_replica_is_freed_and_inference_runs_on_slices(finished):
    freed = 0
    for step in finished.accounts():
        spans = timeline(finished, step).spans
        # On a busy machine a step may end before its tail is looked at.
        freed += len([span for span in spans if span.name == "migrate"])
        slices = [span for span in spans if span.name == "micro-group" and span.track.startswith("lane slice")]
        assert sum(int(span.args["samples"]) for span in slices) == SAMPLES
    assert 0 < freed <= len(finished.accounts()), "a replica each step at most"


def test_the_calculator_s_tokens_are_no_part_of_the_loss_and_the_log_probs_are_the_trainer_s(finished):
    for step, metrics in finished.metrics.items():
        assert metrics["training/rollout_probs_diff_max"] < 6e-5
        generated = sum(int(span.args["response_tokens"]) for spans in turns(finished, step).values() for span in spans)
        # An answer of the calculator is three tokens, which no request generated.
        assert metrics["response_length/mean"] * SAMPLES > generated
        # Lengths are predicted and priced by this share.
        share = generated / (metrics["response_length/mean"] * SAMPLES)
        assert metrics["fuse/generated_share"] == pytest.approx(share, abs=1e-6)
