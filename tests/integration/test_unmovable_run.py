"""Two real PPO runs on two vLLM replicas whose agents use stop strings, seeds and penalties while the tail is to
move, by a migration threshold and by `cut_fraction`; in the first, a replica with a small KV cache also takes over more
than it can hold."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

from verl_fuse.spec.timeline import Span, Timeline

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
import unmovable
from plugin_site import install_plugin

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes five minutes: VERL_FUSE_LONG=1"),
]

SAMPLES = unmovable.PROMPTS * unmovable.PER_PROMPT
# All long samples and none else.
THRESHOLD = unmovable.PROMPTS
# Of a replica's KV cache, in tokens: room for half of a step, or for the six long samples of the first steps, but not
# for six longer ones.
BLOCK, BLOCKS = 16, 68
CUT_STEPS = unmovable.SHORT_STUCK


def finish(verl_home: Path, folder: Path, name: str, steps: int, *overrides: str) -> Finished:
    agents = folder / "agents.yaml"
    agents.write_text(unmovable.AGENTS)
    install_plugin(folder / "site", "counting", unmovable.COUNTING)
    path = [str(folder / "site"), str(Path(unmovable.__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("PREEMPTIONS", str(folder / "preemptions.jsonl"))
        done = run(
            verl_home,
            "ppo-cpu",
            *SMALL,
            *SMALL_CRITIC,
            "actor_rollout_ref.rollout.agent.default_agent_loop=unmovable",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
            "actor_rollout_ref.rollout.disable_log_stats=false",
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override={BLOCKS}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            *overrides,
            name=name,
        )
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def by_threshold(verl_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("threshold")
    done = finish(
        verl_home,
        folder,
        "unmovable",
        unmovable.STEPS,
        "fuse.interstage.enabled=true",
        "fuse.interstage.layout=slices",
        f"fuse.interstage.migration_threshold={THRESHOLD}",
    )
    return done, [json.loads(line)["servers"] for line in (folder / "preemptions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def by_cut_fraction(verl_home, tmp_path_factory):
    options = ("fuse.elastic.enabled=true", "fuse.elastic.release=true", "fuse.elastic.cut_fraction=0.5")
    return finish(verl_home, tmp_path_factory.mktemp("cut"), "cut", CUT_STEPS, *options)


def requests(finished: Finished, step: int) -> list[Span]:
    timeline = Timeline.from_json((finished.folder / f"timeline/step_{step:06d}.json").read_text())
    return [span for span in timeline.spans if span.name == "request"]


def tokens_of_samples(finished: Finished, step: int) -> int:
    """Response tokens of all that was generated, without what was started again."""
    spans = requests(finished, step)
    kept = [span.args for span in spans if not ("unmovable" in span.args and span.args["stop_reason"] == "aborted")]
    assert sum(args["stop_reason"] == "completed" for args in kept) == SAMPLES
    return sum(args["response_tokens"] for args in kept)


def assert_whole(finished: Finished, steps: int) -> None:
    accounts = finished.accounts()
    assert sorted(accounts) == list(range(1, steps + 1))
    assert {(account["samples"], account["missing"]) for account in accounts.values()} == {(SAMPLES, 0)}
    for step, account in accounts.items():
        asked = sum(
            unmovable.length(step, int(prompt), sample)
            for prompt in account["prompts"]
            for sample in range(unmovable.PER_PROMPT)
        )
        assert tokens_of_samples(finished, step) == asked
        assert finished.metrics[step]["fuse/fallbacks"] == 0


def assert_stuck_stay(finished: Finished) -> None:
    for step, stuck in (
        (unmovable.LONG_STUCK, unmovable.PROMPTS),
        (unmovable.SHORT_STUCK, SAMPLES - unmovable.PROMPTS),
    ):
        spans = [span for span in requests(finished, step) if "unmovable" in span.args]
        named = Counter(span.args["unmovable"] for span in spans)
        assert set(named) == {"stop", "seed", "frequency_penalty, presence_penalty"}
        metrics = finished.metrics[step]
        assert metrics["fuse/unmovable_requests"] == stuck
        assert metrics["fuse/restarted_requests"] == 0
        assert {span.args["stop_reason"] for span in spans} == {"completed"}


def test_with_a_threshold_no_sample_is_lost(by_threshold):
    done, _ = by_threshold
    assert_whole(done, unmovable.STEPS)
    assert_stuck_stay(done)
    assert "the last 6 samples stay where they are" in done.output


def test_with_a_cut_fraction_no_sample_is_lost(by_cut_fraction):
    assert_whole(by_cut_fraction, CUT_STEPS)
    assert_stuck_stay(by_cut_fraction)


def test_an_overfull_survivor_preempts_and_nothing_is_lost(by_threshold):
    done, servers = by_threshold
    assert {(server["tokens"], server["counters"]) for step in servers for server in step} == {(BLOCK * BLOCKS, 1)}
    preempted = [sum(server["preempted"] for server in step) for step in servers]
    assert preempted[-1] > preempted[unmovable.LONGER - 2], "in the steps with longer samples than expected"
    assert sum(done.metrics[step]["fuse/migrations"] for step in range(unmovable.LONGER, unmovable.STEPS + 1)) >= 1


def test_once_the_lengths_are_known_the_tail_waits_for_room(by_threshold):
    done, _ = by_threshold
    assert done.metrics[unmovable.STEPS]["fuse/tail_without_room"] == 1
    assert "though fuse.interstage.migration_threshold asks for fewer replicas: replica 0 has room for" in done.output
    assert [done.metrics[step]["fuse/tail_without_room"] for step in (1, 2, 3)] == [0, 0, 0]
