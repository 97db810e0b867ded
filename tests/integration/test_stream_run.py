"""A GRPO run of real verl with a long tail, whose complete groups are trained on while the tail generates: each
update is what verl makes of the same batch from the same weights, also after a late reward, a failed call, an evicted
group, and where the run goes on after a rank was killed while it streamed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_runs import SMALL, Finished, run

sys.path.insert(0, str(Path(__file__).parent / "support"))

from verl_fuse.spec.timeline import RANK, STEP, STREAM_UPDATE, Timeline

pytest.importorskip("verl")
fsdp = pytest.importorskip("torch.distributed.fsdp")
NEEDS = "needs torch 2.13: 2.11 has no FSDPModule.reset_iter_state"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not hasattr(fsdp.FSDPModule, "reset_iter_state"), reason=NEEDS),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes three minutes: VERL_FUSE_LONG=1"),
]

STEPS = 8
# As support/stream_recorder.py plants them.
FAULTS = LATE, FAILING, EVICTED = 3, 4, 5
COMMAND = (
    *SMALL,
    "data.train_batch_size=12",
    "data.max_response_length=960",
    "actor_rollout_ref.rollout.max_model_len=976",
    # One long response a step.
    "data.shuffle=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
    "actor_rollout_ref.rollout.agent.default_agent_loop=stream_tail",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "fuse.elastic.enabled=true",
    "fuse.elastic.release=true",
    "fuse.elastic.cut_fraction=0.75",
    "fuse.update.skip_old_log_prob=true",
    "fuse.update.skip_zero_gradient=true",
    "fuse.update.stream=true",
)


@pytest.fixture(scope="module")
def streamed(verl_home: Path, forks) -> Finished:
    done = run(
        verl_home,
        "grpo-cpu",
        *COMMAND,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        name="streamed",
        record=verl_home / "stream",
        recorder="stream_recorder",
        forks=forks,
        timeout=400,
    )
    assert done.code == 0, done.output[-6000:]
    return done


def recorded(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "stream.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def records(verl_home: Path, streamed: Finished) -> dict[int, dict[str, Any]]:
    return recorded(verl_home / "stream")


def test_every_sample_is_trained_once(streamed: Finished):
    assert {step: (account["samples"], account["missing"]) for step, account in streamed.accounts().items()} == {
        step: (48, 0) for step in range(1, STEPS + 1)
    }


def test_each_update_is_verls(records):
    assert sorted(records) == list(range(1, STEPS + 1))
    assert_verls(records)


def assert_verls(records: dict[int, dict[str, Any]]) -> None:
    for step, record in records.items():
        for found in record["differences"]:
            # Relative to gradients whose terms cancel: advantages of a group have no sum. Responses are drawn, and with
            # them how much of the terms is left.
            assert max(found.values()) < 1e-4, (step, found)
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "actor/loss", "actor/lr"):
            assert record["ours"][key] == pytest.approx(record["stock"][key], rel=1e-4, abs=1e-6), (step, key)


def test_complete_groups_are_streamed_before_generation_ends(streamed: Finished, records):
    for step, record in records.items():
        if step not in FAULTS:
            shares = {key.removeprefix("fuse/stream_"): share for key, share in record["stream"].items()}
            # The long response is nearly half of the tokens.
            assert shares["tokens"] > 0.3, (step, shares)
            assert shares["missed_tokens"] == 0.0, (step, shares)
    timeline = Timeline.from_json((streamed.folder / "timeline/step_000002.json").read_text())
    (generation,) = [span for span in timeline.on(STEP) if span.name == "gen"]
    early = [span for span in timeline.spans if span.name == STREAM_UPDATE and span.start < generation.end]
    assert early
    assert all(span.track.startswith(RANK) for span in early)
    assert early[0].end < generation.end


def test_what_changes_after_it_was_streamed_is_dropped(streamed: Finished, records):
    fallbacks = {step: int(record["stream"]["fuse/stream_fallbacks"]) for step, record in records.items()}
    assert fallbacks == {step: sum(fault <= step for fault in FAULTS) for step in fallbacks}
    assert "drops what it streamed: the advantage of sample" in streamed.output
    assert "MemoryError: planted" in streamed.output
    assert "was discarded after it was streamed" in streamed.output
    assert {streamed.metrics[step]["fuse/fallbacks"] for step in streamed.metrics} == {0.0}


DIES, ENDS = 3, 5


def mortal(home: Path, forks: dict[str, str], record: str, dies: int) -> Finished:
    """Steps up to ENDS, each saved; a rank is killed in step `dies` once it has streamed."""
    return run(
        home,
        "grpo-cpu",
        *COMMAND,
        f"trainer.total_training_steps={ENDS}",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        name="stream_mortal",
        record=home / record,
        recorder="stream_recorder,stream_faults",
        variables={"STREAM_FAULTS": "0 0 0", "STREAM_DIES_AT": str(dies)},
        forks=forks,
        timeout=400,
    )


def test_a_rank_that_is_killed_while_it_streams_ends_the_run_which_goes_on_from_its_checkpoint(verl_home: Path, forks):
    killed = mortal(verl_home, forks, "killed", DIES)
    assert killed.code != 0
    assert "streamed update 0 of step 3" in killed.output, killed.output[-4000:]
    assert sorted(path.name for path in killed.folder.glob("global_step_*")) == ["global_step_1", "global_step_2"]
    assert sorted(recorded(verl_home / "killed")) == [1, 2]
    resumed = mortal(verl_home, forks, "resumed", 0)
    assert resumed.code == 0, resumed.output[-6000:]
    after = recorded(verl_home / "resumed")
    assert sorted(after) == list(range(DIES, ENDS + 1))
    assert_verls(after)
    assert after[ENDS]["stream"]["fuse/stream_fallbacks"] == 0
    assert max(record["stream"]["fuse/stream_tokens"] for record in after.values()) > 0
