"""A run with data and agents that stock verl trains with: an index that is no number, prompts with numbers of samples
of their own, requests that are given up, a tool that takes long; then an agent-loop worker dies."""

import os
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
from support import awkward

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

SUPPORT = Path(__file__).parent / "support"
AWKWARD = (
    *SMALL,
    "data.shuffle=false",
    f"data.custom_cls.path={SUPPORT}/awkward_data.py",
    "data.custom_cls.name=AwkwardDataset",
    "actor_rollout_ref.rollout.agent.default_agent_loop=awkward",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "fuse.interstage.enabled=true",
    "fuse.interstage.layout=slices",
    "fuse.interstage.migration_threshold=1",
    f"fuse.replica_timeout={awkward.REPLICA_TIMEOUT}",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)


@pytest.fixture(scope="module")
def finished(verl_home, tmp_path_factory, forks) -> Finished:
    agents = tmp_path_factory.mktemp("awkward") / "agents.yaml"
    agents.write_text(awkward.AGENTS)
    agent = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        return run(verl_home, "grpo-cpu", *AWKWARD, agent, name="awkward", forks=forks)


def test_a_step_with_such_data_is_trained_and_accounted_for(finished):
    account = finished.accounts()[1]
    assert (account["samples"], account["missing"], account["groups"]) == (sum(awkward.SAMPLES), 0, 6)
    assert account["prompts"] == [12, 7, None, "[1, 2]", "nan", "q-3"]


def test_the_tail_moves_by_the_samples_that_prompts_asked_for(finished):
    assert sum(awkward.SAMPLES) < 6 * awkward.PER_PROMPT, "by rollout.n the tail would never be due"
    timeline = Timeline.from_json((finished.folder / "timeline/step_000001.json").read_text())
    (moved,) = (span for span in timeline.spans if span.name == "migrate")
    waited = [s for s in timeline.spans if s.name == "request" and s.args.get("response_tokens") == 120]
    assert [moved.end < span.start for span in waited] == [True]


def test_requests_that_are_given_up_and_a_long_wait_for_a_tool_end_no_replica(finished):
    timeline = Timeline.from_json((finished.folder / "timeline/step_000001.json").read_text())
    assert {span.track for span in timeline.spans if span.name == "request"} == {"replica 0", "replica 1"}
    assert f"{awkward.GIVEN_UP} requests were given up" in finished.output
    assert "it is ended" not in finished.output


def test_a_dead_agent_loop_worker_ends_the_run_and_is_named_with_its_prompts(finished):
    assert finished.code == 1, finished.output[-3000:]
    assert "agent-loop worker 0 is dead (ActorDiedError" in finished.screen
    assert "it held 3 unfinished prompt groups, for which the rollout would wait without end: " in finished.screen
    assert finished.screen.count('verl_fuse_cpu/euclid "gcd ') >= 3, "their indices name no row"
    assert sorted(finished.accounts()) == [1]
