"""One PPO run with streaming and a weight sync of shards, stopped after a checkpoint and started
again with the same command."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

from verl_fuse.cli.screen import PHASES
from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS = 4
# Enough samples that some of them are long: the task's lengths are heavy-tailed.
PROMPTS = 14
SAMPLES = 4 * PROMPTS
COMMAND = (
    *SMALL,
    *SMALL_CRITIC,
    f"data.train_batch_size={PROMPTS}",
    # Few requests at a time: samples finish one after the other, as in a rollout much larger than its engines.
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "fuse.interstage.enabled=true",
    "fuse.realloc.weight_sync=shards",
    "fuse.realloc.checksums=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # Validation before training goes through the same replay buffer.
    "trainer.val_before_train=true",
    "data.val_max_samples=16",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.resume_mode=auto",
)


def checkpointed_and_training_on(folder: Path) -> bool:
    """The checkpoint of step 2 is written and step 3 has its batch."""
    return (folder / "accounts/step_000003.json").exists()


@pytest.fixture(scope="module")
def stopped(verl_home) -> Finished:
    return run(verl_home, "ppo-cpu", *COMMAND, name="resumed", stop_when=checkpointed_and_training_on)


@pytest.fixture(scope="module")
def resumed(verl_home, stopped, forks) -> Finished:
    done = run(
        verl_home,
        "ppo-cpu",
        *COMMAND,
        name="resumed",
        record=verl_home / "resumed.numbers",
        recorder="rollout_recorder",
        forks=forks,
    )
    assert done.code == 0, done.output[-4000:]
    return done


def timeline(finished: Finished, step: int) -> Timeline:
    return Timeline.from_json((finished.folder / f"timeline/step_{step:06d}.json").read_text())


def test_stopping_ends_the_run_with_a_sentence_and_no_process_left(stopped):
    assert stopped.code == 128 + signal.SIGTERM
    assert re.fullmatch(
        r"verl-fuse: stopped by SIGTERM after step [23]; the same command goes on from the checkpoint of step 2",
        stopped.screen.splitlines()[-1],
    )
    assert "exit code" not in stopped.screen
    assert "Traceback" not in stopped.screen
    marker = f"trainer.default_local_dir={stopped.folder}"
    assert [pid for pid in filter(str.isdigit, os.listdir("/proc")) if marker in command_line(pid)] == []


def command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_the_same_command_goes_on_after_the_checkpoint(resumed):
    assert "verl starts after step 2" in resumed.screen
    assert sorted(resumed.metrics) == [0, 1, 2, 3, 4]
    # Logged by the first part, and by the second before it trained.
    assert {"timing_s/step", "val-core/verl_fuse_cpu/euclid/acc/mean@1"} <= resumed.metrics[2].keys()
    assert (resumed.folder / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_over_both_runs_every_sample_is_trained_exactly_once(resumed):
    accounts = resumed.accounts()
    assert sorted(accounts) == [1, 2, 3, 4]
    assert {(a["samples"], a["missing"], a["groups"]) for a in accounts.values()} == {(SAMPLES, 0, PROMPTS)}
    prompts = [prompt for account in accounts.values() for prompt in account["prompts"]]
    assert len(set(prompts)) == len(prompts) == STEPS * PROMPTS, "no prompt of the epoch twice"


def test_reference_and_critic_run_inside_the_generation_span(resumed):
    inside = {step: started_during_generation(timeline(resumed, step)) for step in resumed.accounts()}
    assert any({"ref", "values"} <= names for names in inside.values()), inside
    assert any(metrics.get("fuse/overlap_seconds", 0) > 0 for metrics in resumed.metrics.values())
    # Engines that are much faster than training leave little to run beside: how much it is, depends on the machine.
    assert any(metrics.get("fuse/streamed_samples", 0) >= 8 for metrics in resumed.metrics.values())
    for metrics in (resumed.metrics[3], resumed.metrics[4]):
        assert 0 <= metrics["fuse/overlap_fraction"] < 1
        assert metrics["fuse/fallbacks"] == 0


def started_during_generation(spans: Timeline) -> set[str]:
    (generation,) = [span for span in spans.on("step") if span.name == "gen"]
    return {span.name for span in spans.on("lane train") if generation.start < span.start < generation.end}


def test_the_timeline_has_every_request_rank_lane_and_stage(resumed):
    spans = timeline(resumed, 4)
    assert {"lane train", "rank 0", "rank 1", "replica 0", "replica 1", "step"} == set(spans.tracks)
    assert len({span.args["prompt"] for span in spans.spans if span.name == "request"}) == PROMPTS
    requests = [span for track in ("replica 0", "replica 1") for span in spans.on(track)]
    assert len(requests) == SAMPLES
    assert all(span.args["response_tokens"] > 0 and span.args["stop_reason"] for span in requests)
    stages = [span.name for span in sorted(spans.on("step"), key=lambda span: span.start)]
    assert stages == [
        "gen",
        "sleep",
        "drain",
        "balance",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "save_checkpoint",
        "update_weights",
    ]
    for rank in ("rank 0", "rank 1"):
        names = {span.name for span in spans.on(rank)}
        assert names == {
            "old_log_prob",
            "ref",
            "shards",
            "values",
            "update_critic",
            "update_actor",
            "save_checkpoint",
            "update_weights",
        }
    assert all(spans.start <= span.start and span.end <= spans.end + 1 for span in spans.on("step"))


def test_pages_and_traces_are_written(resumed):
    assert (resumed.folder / "timeline.html").read_text().count("step_00000") >= STEPS
    trace = json.loads((resumed.folder / "timeline/step_000004.perfetto.json").read_text())
    assert len(trace["traceEvents"]) > SAMPLES


def test_metrics_account_for_the_step(resumed):
    metrics = resumed.metrics[4]
    assert metrics["fuse/samples_trained"] == SAMPLES
    assert metrics["fuse/samples_missing"] == 0
    assert metrics["fuse/rows_padding"] == 8
    assert 0 < metrics["fuse/idle_fraction/replica"] < 1
    assert metrics["fuse/step_seconds"] == pytest.approx(metrics["timing_s/step"], rel=0.05)


def test_progress_lines_tell_what_is_done_and_how_long_the_rest_takes(resumed):
    for step in (3, 4):
        assert resumed.screen.count(f"verl-fuse: step {step}/{STEPS} done in ") == 1
    assert resumed.output.count(f"{PROMPTS}/{PROMPTS} groups trained") >= 2
    assert "ETA" in resumed.output


def test_the_screen_shows_phases_steps_and_a_whole_account_of_the_step_and_the_log_the_rest(resumed):
    lines = resumed.screen.splitlines()
    assert len(lines) <= 60, resumed.screen
    phases = [phase for phase in PHASES.values() if any(line.endswith(f"verl-fuse: {phase}") for line in lines)]
    assert phases == list(PHASES.values())
    assert "pid=" not in resumed.screen
    assert len((resumed.folder / "run.log").read_text().splitlines()) > 500
    shares = dict(re.findall(r"^(\w+) +[\d.]+ +(\d+)%", resumed.screen, re.MULTILINE))
    assert {
        "gen",
        "drain",
        "balance",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "other",
    } < shares.keys()
    assert shares.pop("step") == "100"
    assert sum(map(int, shares.values())) == pytest.approx(100, abs=len(shares) / 2)
    assert re.search(r"^Hidden: \d+\.\d{3} s of inference a step ran while samples", resumed.screen, re.MULTILINE)


def saved(finished: Finished, name: str) -> dict[str, Any]:
    import torch

    return torch.load(finished.folder.with_name("resumed.numbers") / name)


@pytest.mark.parametrize("update", [1, 2])
def test_replicas_have_the_weights_that_were_trained(resumed, update):
    import torch

    ranks = [saved(resumed, f"actor_{update}_rank{rank}.pt") for rank in range(2)]
    trained = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
    for replica in range(2):
        found = saved(resumed, f"rollout_{replica}_{update}.pt")
        before = saved(resumed, f"rollout_{replica}_{update - 1}.pt")
        assert len(found) > 10
        for name, tensor in found.items():
            for fused, parts in (
                ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
                ("gate_up_proj", ("gate_proj", "up_proj")),
            ):
                if fused in name:
                    whole = torch.cat([trained[name.replace(fused, part)] for part in parts])
                    break
            else:
                whole = trained[name]
            # vLLM pads the vocabulary with zeros.
            assert torch.equal(tensor[: len(whole)], whole), name
            assert not tensor[len(whole) :].any(), name
            if name.endswith("weight"):
                assert not torch.equal(tensor, before[name]), f"{name}: of the step before"


def test_ranks_receive_the_shards_they_do_not_hold(resumed):
    whole = sum(t.nbytes for rank in range(2) for t in saved(resumed, f"actor_1_rank{rank}.pt").values())
    for step in resumed.accounts():
        if step in (3, 4):
            spans = [span for span in timeline(resumed, step).spans if span.name == "shards"]
            assert {(span.track, span.args["version"]) for span in spans} == {("rank 0", step), ("rank 1", step)}
            assert sum(span.args["received_bytes"] for span in spans) == whole, (
                "one replica a rank: all that the other holds"
            )


def test_replicas_generate_with_the_probabilities_that_are_trained(resumed):
    for metrics in (resumed.metrics[3], resumed.metrics[4]):
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
