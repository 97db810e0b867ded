"""A real GRPO run on two nodes, a training rank, a vLLM replica and a slice on each; the second one's clock is a minute
and a half ahead."""

import os
import sys
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from two_nodes import HEAD, two_nodes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    # Another start of everything: more than the suite's time allows on two cores.
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes three minutes: VERL_FUSE_LONG=1"),
]

STEPS, SAMPLES = 3, 24
RAY = ("num_cpus", "num_gpus", "object_store_memory")


@pytest.fixture(scope="module")
def finished(verl_home, tmp_path_factory) -> Finished:
    variables = {
        "VERL_FUSE_HOME": str(verl_home),
        "VERL_FILE_LOGGER_PATH": str(verl_home / "two_nodes" / "metrics.jsonl"),
    }
    with two_nodes(tmp_path_factory.mktemp("nodes"), **variables) as nodes:
        done = run(
            verl_home,
            "grpo-cpu",
            *SMALL,
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=1",
            f"+ray_kwargs.ray_init.address={nodes.address}",
            f"+ray_kwargs.ray_init._node_ip_address={HEAD}",
            *(f"ray_kwargs.ray_init.{key}=null" for key in RAY),
            "fuse.interstage.enabled=true",
            "fuse.interstage.layout=slices",
            "fuse.interstage.migration_threshold=0.25",
            f"trainer.total_training_steps={STEPS}",
            name="two_nodes",
            timeout=900,
        )
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def timelines(finished) -> dict[int, Timeline]:
    files = {step: finished.folder / f"timeline/step_{step:06d}.json" for step in range(1, STEPS + 1)}
    return {step: Timeline.from_json(file.read_text()) for step, file in files.items()}


def test_every_sample_is_trained_once_with_the_probabilities_it_was_generated_with(finished):
    counted = {step: (of["samples"], of["missing"]) for step, of in finished.accounts().items()}
    assert counted == dict.fromkeys(range(1, STEPS + 1), (SAMPLES, 0))
    for metrics in finished.metrics.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        assert metrics["fuse/streamed_samples"] > 0


def test_both_nodes_generate_and_infer(timelines):
    for timeline in timelines.values():
        requests = [span.track for span in timeline.spans if span.name == "request"]
        assert set(requests) == {"replica 0", "replica 1"}
        assert {span.name for number in range(2) for span in timeline.on(f"slice {number}")} >= {"old_log_prob", "ref"}


def test_what_ranks_of_both_nodes_do_together_is_at_one_time(timelines):
    """An update is a collective: it ends together."""
    for timeline in timelines.values():
        first, second = ([s for s in timeline.on(f"rank {rank}") if s.name == "update_actor"] for rank in range(2))
        assert len(first) == len(second) == 1
        assert second[0].end == pytest.approx(first[0].end, abs=0.5)
        assert timeline.start <= second[0].start <= second[0].end <= timeline.end + 0.5


def test_slices_give_memory_back_before_anything_is_trained_or_wakes(timelines):
    for timeline in timelines.values():
        begun = min(span.start for span in timeline.on("lane train") if span.name in ("update_actor", "update_weights"))
        given = [span for number in range(2) for span in timeline.on(f"lane slice {number}")]
        assert {span.track for span in given if span.name == "release_memory"} == {"lane slice 0", "lane slice 1"}
        assert all(span.end <= begun for span in given if span.name == "release_memory")


def test_a_folder_that_all_nodes_see_is_no_warning(finished):
    assert "is not found on" not in finished.output
