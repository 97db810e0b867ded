"""GRPO with eight samples per prompt on real vLLM: assigned prompts are prefilled once, in the same run in which verl's
routing prefills them twice."""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from verl_runs import run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from long_prompts import ALTERNATING, LONGEST, PROMPTS, make_task
from plugin_site import install_plugin

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes three minutes: VERL_FUSE_LONG=1"),
]

STEPS, SAMPLES, RESPONSE = 2, 8, 12
ASSIGNED, STOCK = (1,), (2,)


@pytest.fixture(scope="module")
def finished(verl_home, tmp_path_factory, forks):
    folder = tmp_path_factory.mktemp("prefix")
    make_task(folder)
    install_plugin(folder / "site", "alternating", ALTERNATING)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("PREFIX_COUNTERS", str(folder / "counters.jsonl"))
        done = run(
            verl_home,
            "grpo-cpu",
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/validation.parquet",
            f"actor_rollout_ref.model.path={folder}/model",
            f"data.train_batch_size={PROMPTS}",
            f"data.max_prompt_length={LONGEST + 8}",
            f"data.max_response_length={RESPONSE}",
            f"actor_rollout_ref.rollout.max_model_len={LONGEST + RESPONSE + 8}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.rollout.disable_log_stats=false",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=16",
            "fuse.elastic.enabled=true",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.save_freq={STEPS}",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.total_epochs={STEPS}",
            name="prefix",
            forks=forks,
        )
    assert done.code == 0, done.output[-4000:]
    return done, [json.loads(line) for line in (folder / "counters.jsonl").read_text().splitlines()]


def timeline(done, step: int) -> Timeline:
    return Timeline.from_json((done.folder / f"timeline/step_{step:06d}.json").read_text())


def prefills(done, counters, step: int) -> float:
    """Prompt tokens the engines computed in a step, by their own counters, per token of its prompts."""
    before = counters[step - 2]["servers"] if step > 1 else [{"queries": 0.0, "hits": 0.0}] * 2
    now = counters[step - 1]["servers"]
    computed = sum(n["queries"] - n["hits"] - b["queries"] + b["hits"] for n, b in zip(now, before, strict=True))
    unique = {s.args["prompt"]: int(s.args["prompt_tokens"]) for s in timeline(done, step).spans if "prompt" in s.args}
    assert len(unique) == PROMPTS
    return computed / sum(unique.values())


def test_assigned_prompts_are_prefilled_once_where_verl_prefills_them_on_every_replica(finished):
    done, counters = finished
    assert [(entry["step"], entry["assigned"]) for entry in counters] == [(1, True), (2, False)]
    found = {step: prefills(done, counters, step) for step in range(1, STEPS + 1)}
    print(found)
    assert max(found[step] for step in ASSIGNED) <= 1.15
    assert min(found[step] for step in STOCK) > 1.5


def test_the_metric_is_what_the_engine_counts(finished):
    done, counters = finished
    for step, metrics in done.metrics.items():
        assert metrics["fuse/prefills_per_prompt_token"] == pytest.approx(prefills(done, counters, step), rel=0.01)


def test_samples_of_an_assigned_prompt_share_a_replica(finished):
    done, _ = finished
    for step in (*ASSIGNED, *STOCK):
        tracks, loads = defaultdict(set), defaultdict(int)
        for span in timeline(done, step).spans:
            if span.name == "request":
                tracks[span.args["prompt"]].add(span.track)
                loads[span.track] += 1
        assert len(tracks) == PROMPTS
        assert sum(loads.values()) == PROMPTS * SAMPLES
        replicas = [len(found) for found in tracks.values()]
        if step in ASSIGNED:
            assert set(replicas) == {1}, step
        else:
            # verl asks for the replica with the fewest requests, which may be the same one for all of a prompt.
            assert replicas.count(2) > PROMPTS / 2, step
        assert len(loads) == 2


def test_lengths_are_learned_calibrated_and_kept_with_the_checkpoint(finished):
    done, _ = finished
    assert "fuse/elastic_upper_coverage" not in done.metrics[1], "nothing was known in the first step"
    assert 0.0 <= done.metrics[2]["fuse/elastic_upper_coverage"] <= 1.0
    state = json.loads((done.folder / f"global_step_{STEPS}/fuse_elastic.json").read_text())
    assert len(state["lengths"]["means"]) == PROMPTS
    assert len(state["lengths"]["recent"]["numbers"]) == STEPS * PROMPTS * SAMPLES
    assert state["costs"]["decode"] is None, "the first step was cold, and the second had not ended"


def test_every_sample_is_trained_once_and_no_policy_fell_back(finished):
    done, _ = finished
    assert {(a["samples"], a["missing"]) for a in done.accounts().values()} == {(PROMPTS * SAMPLES, 0)}
    assert {metrics["fuse/fallbacks"] for metrics in done.metrics.values()} == {0}
