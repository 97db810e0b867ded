"""Knowledge that real runs gain from their steps. GRPO with dynamic sampling (DAPO), whose steps ask for more prompts
while they run, on elastic replicas; PPO with the automatic migration threshold. Each is stopped by its checkpoint and
goes on in a new process, whose first step is decided on what the first run knew."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
from support.dynamic_sampling import AGENTS, WITNESS
from support.plugin_site import install_plugin

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes eight minutes: VERL_FUSE_LONG=1"),
]

# The first run's last step is the first one whose checkpoint knows costs of two steps: that of a step is written before
# the step ends.
STEPS = 4
PROMPTS, PER_PROMPT = 6, 4
DATA = 18
DYNAMIC = (
    *SMALL,
    "algorithm.filter_groups.enable=true",
    "actor_rollout_ref.rollout.agent.default_agent_loop=dynamic",
    f"data.train_max_samples={DATA}",
    "data.shuffle=false",
    "trainer.total_epochs=9",
    "fuse.elastic.enabled=true",
    "fuse.elastic.scale=true",
    # Time alone counts: a few prompts are no faster on two replicas, a whole step is.
    "fuse.elastic.cost_weight=0.0",
    "fuse.elastic.hysteresis=0.0",
)
AUTOMATIC = (
    *SMALL,
    *SMALL_CRITIC,
    "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
    "fuse.interstage.enabled=true",
    "fuse.interstage.layout=slices",
    "fuse.interstage.migration_threshold=auto",
)


@pytest.fixture(scope="module")
def train(verl_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    agents = folder / "agents.yaml"
    agents.write_text(AGENTS)
    install_plugin(folder / "site", "witness", WITNESS)
    support = Path(__file__).parent / "support"
    path = os.pathsep.join([str(folder / "site"), str(support), os.environ.get("PYTHONPATH", "")])

    def train(recipe: str, name: str, steps: int, *overrides: str) -> Finished:
        agent = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}"
        until = (f"trainer.total_training_steps={steps}", f"trainer.save_freq={STEPS}", "trainer.resume_mode=auto")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            patch.setenv("WITNESS", str(verl_home / f"{name}.jsonl"))
            done = run(verl_home, recipe, *overrides, agent, *until, name=name)
        assert done.code == 0, done.output[-4000:]
        return done

    return train


@pytest.fixture(scope="module")
def dynamic(train):
    return train("grpo-cpu", "dynamic", STEPS, *DYNAMIC)


@pytest.fixture(scope="module")
def dynamic_resumed(train, dynamic):
    return train("grpo-cpu", "dynamic", STEPS + 1, *DYNAMIC)


@pytest.fixture(scope="module")
def automatic(train):
    return train("ppo-cpu", "automatic", STEPS, *AUTOMATIC)


@pytest.fixture(scope="module")
def automatic_resumed(train, automatic):
    return train("ppo-cpu", "automatic", STEPS + 1, *AUTOMATIC)


def timeline(done: Finished, step: int) -> Timeline:
    return Timeline.from_json((done.folder / f"timeline/step_{step:06d}.json").read_text())


def measured(done: Finished, name: str) -> dict[int, float | None]:
    """A metric in the first run's steps; the resumed run's are in the same file."""
    return {step: metrics.get(name) for step, metrics in done.metrics.items() if step <= STEPS}


def told(done: Finished) -> dict[int, dict]:
    """Return each step's plan and its samples."""
    lines = done.folder.with_name(f"{done.folder.name}.jsonl").read_text().splitlines()
    return {entry["step"]: entry for entry in map(json.loads, lines)}


def test_a_step_s_plan_holds_every_prompt_it_asked_for(dynamic):
    for step, entry in told(dynamic).items():
        asked = {span.args["prompt"] for span in timeline(dynamic, step).spans if span.name == "request"}
        assert len(asked) > PROMPTS, "the step asked for more"
        assert entry["prompts"].keys() == asked
        assert len(entry["responses"]) == PROMPTS
        assert {**entry["responses"], **entry["discarded"]}.keys() == asked
        assert {len(lengths) for part in ("responses", "discarded") for lengths in entry[part].values()} == {PER_PROMPT}
        if step > 1:
            assert None not in [predicted for _, predicted in entry["prompts"].values()]


def test_every_prompt_s_samples_share_a_replica_and_no_replica_is_freed_within_a_step(dynamic):
    for step in range(1, STEPS + 1):
        tracks = defaultdict(set)
        requests = [span for span in timeline(dynamic, step).spans if span.name == "request"]
        for span in requests:
            tracks[span.args["prompt"]].add(span.track)
        assert {len(found) for found in tracks.values()} == {1}
        begun = min(span.start for span in requests)
        freed = [span for span in timeline(dynamic, step).spans if span.name == "migrate"]
        assert all(span.end <= begun for span in freed), f"step {step}"


def test_discarded_groups_teach_lengths_as_trained_ones_do(dynamic):
    state = json.loads((dynamic.folder / f"global_step_{STEPS}/fuse_elastic.json").read_text())
    steps = told(dynamic)
    keys = {key for entry in steps.values() for key, _ in entry["prompts"].values()}
    assert state["lengths"]["means"].keys() == keys
    # Two prompts of the data set may read alike.
    assert len(keys) > 0.9 * DATA, "every prompt of the data set, a third of which is never trained on"
    generated = sum(len(entry["prompts"]) for entry in steps.values())
    assert sum(map(len, state["lengths"]["recent"].values())) == generated * PER_PROMPT
    # A prompt's lengths do not change: from the second visit to it on every prediction is right.
    last = steps[STEPS]
    lengths = {**last["responses"], **last["discarded"]}
    right = [last["prompts"][uid][1] == pytest.approx(sum(found) / PER_PROMPT) for uid, found in lengths.items()]
    assert sum(right) >= 0.8 * len(right)
    assert dynamic.metrics[STEPS]["fuse/elastic_rank_correlation"] > 0.9


def test_decoding_is_priced_by_warm_steps_and_the_price_survives_the_checkpoint(dynamic, dynamic_resumed):
    predicted = measured(dynamic, "fuse/elastic_predicted_seconds")
    print(predicted, measured(dynamic, "fuse/device_seconds_busy"))
    assert [step for step, seconds in predicted.items() if seconds is not None] == [3, 4]
    decode = json.loads((dynamic.folder / f"global_step_{STEPS}/fuse_elastic.json").read_text())["costs"]["decode"]
    assert 0 < decode["step"] < 0.2
    assert "fuse/elastic_predicted_seconds" in dynamic_resumed.metrics[STEPS + 1]
    assert f"step {STEPS + 1}: " in dynamic_resumed.output
    everything = {**dynamic.accounts(), **dynamic_resumed.accounts()}
    assert sorted(everything) == list(range(1, STEPS + 2))
    assert {(a["samples"], a["missing"], a["groups"]) for a in everything.values()} == {
        (PROMPTS * PER_PROMPT, 0, PROMPTS)
    }
    assert {m["fuse/fallbacks"] for done in (dynamic, dynamic_resumed) for m in done.metrics.values()} == {0}


def test_the_automatic_threshold_is_decided_on_warm_steps_and_in_the_log(automatic, automatic_resumed):
    decided, took = measured(automatic, "fuse/predicted_stock_seconds"), measured(automatic, "fuse/stage_seconds")
    resumed = automatic_resumed.metrics[STEPS + 1]
    print(decided, took, resumed["fuse/predicted_stock_seconds"], resumed["fuse/stage_seconds"])
    assert [step for step, seconds in decided.items() if seconds is not None] == [3, 4]
    lines = {
        step: [line for line in automatic.output.splitlines() if f"step {step}: migration" in line] for step in took
    }
    assert {len(found) for found in lines.values()} == {1}
    assert "not all of generation and inference has been measured yet" in lines[2][0]
    assert f"{decided[3]:.2f} s without migration), {took[3]:.2f} s measured" in lines[3][0]
    assert f"step {STEPS + 1}: migration threshold" in automatic_resumed.output
    assert resumed["fuse/predicted_stock_seconds"] == pytest.approx(decided[STEPS], rel=0.5)
