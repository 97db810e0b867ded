"""The recipe dapo-cpu on real verl: dynamic sampling discards a third of the groups while their samples are in
inference, and asks for others. Samples fail in one step; in the step after the last one that is trained, all groups are
discarded, and the run is stopped."""

import os
import re
import signal
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.cli.run import LOG
from verl_fuse.spec.timeline import Span, Timeline

pytest.importorskip("verl")
from support.dynamic_sampling import AGENTS, fails

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes four minutes: VERL_FUSE_LONG=1"),
]

STEPS, FAILING, PROMPTS, PER_PROMPT = 3, 2, 6, 4
SAMPLES = PROMPTS * PER_PROMPT
DYNAMIC = (
    *SMALL,
    f"trainer.total_training_steps={STEPS + 1}",
    "algorithm.filter_groups.metric=reward",
    # Rewards are the agent's.
    "reward.reward_manager.name=naive",
    "actor_rollout_ref.rollout.agent.default_agent_loop=dynamic",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "data.train_max_samples=18",
    "data.shuffle=false",
    "trainer.total_epochs=99",
    # Samples of a group finish one after the other: some are in inference before their group is discarded.
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "fuse.interstage.micro_group=2",
    "fuse.interstage.start_unfinished_fraction=1.0",
    "trainer.save_freq=-1",
)


IN_VAIN = re.compile(r"verl-fuse: (\d+) groups generated in this step: (\d+) discarded \((.*)\), 0 kept$", re.MULTILINE)
WARNED = re.compile(
    r"verl-fuse: warning: (\d+) groups were discarded and none was kept meanwhile \((\d+) with reward 1 throughout\)\. "
)


def in_vain_for_a_while(folder: Path) -> bool:
    """The run has warned of the step that discards all groups, and goes on telling."""
    log = folder / LOG
    warned = log.read_text(errors="replace").partition("none was kept meanwhile")[2] if log.exists() else ""
    return IN_VAIN.search(warned) is not None


@pytest.fixture(scope="module")
def finished(verl_home, tmp_path_factory, forks) -> Finished:
    agents = tmp_path_factory.mktemp("dapo") / "agents.yaml"
    agents.write_text(AGENTS)
    support = Path(__file__).parent / "support"
    agent = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("FAILING_STEP", str(FAILING))
        patch.setenv("IN_VAIN_FROM", str(STEPS + 1))
        done = run(verl_home, "dapo-cpu", *DYNAMIC, agent, name="dapo", forks=forks, stop_when=in_vain_for_a_while)
    assert done.code == 128 + signal.SIGTERM, done.output[-4000:]
    return done


def timeline(done: Finished, step: int) -> Timeline:
    return Timeline.from_json((done.folder / f"timeline/step_{step:06d}.json").read_text())


def requests(spans: Timeline) -> list[Span]:
    """In the order in which they were sent."""
    return sorted((span for span in spans.spans if span.name == "request"), key=lambda span: span.start)


def test_every_step_trains_whole_groups_and_none_that_was_discarded(finished):
    accounts = finished.accounts()
    assert sorted(accounts) == list(range(1, STEPS + 1))
    for step, account in accounts.items():
        failed = sum(fails(prompt, session) for prompt in account["prompts"] for session in range(PER_PROMPT))
        missing = failed if step == FAILING else 0
        assert (account["samples"], account["missing"], account["groups"]) == (SAMPLES - missing, missing, PROMPTS)
        # The rewards of every third prompt are all alike.
        assert [prompt for prompt in account["prompts"] if prompt % 3 == 0] == []


def test_samples_of_discarded_groups_were_in_inference_and_are_counted(finished):
    for step, metrics in finished.metrics.items():
        discarded = metrics["training/filter_groups/evicted_samples"]
        assert discarded >= 1, f"step {step}: verl discarded no group"
        assert len(requests(timeline(finished, step))) > SAMPLES, f"step {step}: none was asked for in its place"
        assert metrics["fuse/fallbacks"] == 0
    in_vain = {step: metrics["fuse/inference_discarded"] for step, metrics in finished.metrics.items()}
    assert max(in_vain.values()) > 0, in_vain
    streamed = {step: metrics["fuse/streamed_samples"] for step, metrics in finished.metrics.items()}
    assert all(streamed[step] > in_vain[step] for step in streamed), (streamed, in_vain)


def test_samples_asked_for_later_are_streamed_like_the_first_ones(finished):
    found = {}
    for step in finished.metrics:
        spans = timeline(finished, step)
        first_round = max(span.end for span in requests(spans)[:SAMPLES])
        (generation,) = [span for span in spans.on("step") if span.name == "gen"]
        found[step] = sum(
            int(span.args["samples"])
            for span in spans.on("lane train")
            if span.category == "inference" and first_round < span.start < generation.end
        )
    # Two micro-groups may wait from before. In a step in which one of the first requests is the last to end, which
    # other work of the machine decides, no span tells the later ones apart.
    assert max(found.values()) > 4, found


def test_the_numbers_are_the_trainer_s_own(finished):
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in finished.metrics.values()) < 6e-5


def test_the_screen_says_which_samples_are_missing_and_why(finished):
    missing = finished.accounts()[FAILING]["missing"]
    assert missing
    done = rf"step {FAILING}/{STEPS + 1} done in .*: {PROMPTS}/{PROMPTS} groups trained "
    assert re.search(rf"{done}\({SAMPLES - missing} samples, {missing} missing\)", finished.screen)
    lost = rf"verl-fuse: warning: step {FAILING}: {missing} samples are missing and are not trained on; "
    found = re.search(rf"{lost}agent loops failed: RuntimeError: no answer for prompt (\d+)(.*)", finished.screen)
    assert found, finished.screen
    assert fails(int(found[1]), 0)
    # Groups that were one too many failed too.
    more = re.fullmatch(r" \(and (\d+) more\)", found[2])
    assert (int(more[1]) if more else 0) >= missing - 1
    for step in set(finished.accounts()) - {FAILING}:
        assert f"groups trained ({SAMPLES} samples)" in re.search(rf"step {step}/.* done .*", finished.screen)[0]


def test_a_step_that_discards_all_groups_says_so_and_why(finished):
    generated, discarded, why = IN_VAIN.findall(finished.screen)[-1]
    assert generated == discarded
    assert why == f"{discarded} with reward 1 throughout"
    ((warned, alike),) = WARNED.findall(finished.screen)
    assert int(warned) == int(alike) >= 4 * PROMPTS
