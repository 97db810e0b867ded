"""GRPO of random models of several families on real verl and vLLM: slices, a tail that moves, assignment, and a sync
of shards that leaves every parameter of vLLM's model bitwise as it was trained.

The table of families is in verl_fuse/spec/README.md.
"""

import os
import sys
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, make_task, run

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from family_tasks import WHOLE, of_vllm, write_task

LONG = os.environ.get("VERL_FUSE_LONG") == "1"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not LONG, reason="VERL_FUSE_LONG=1 trains models of several families"),
]

STEPS, PROMPTS, PER_PROMPT = 2, 6, 4
SAMPLES = PROMPTS * PER_PROMPT
COMMAND = (
    *SMALL,
    f"trainer.total_training_steps={STEPS}",
    "data.max_response_length=48",
    "actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "fuse.interstage.enabled=true",
    "fuse.interstage.layout=slices",
    "fuse.interstage.migration_threshold=8",
    "fuse.elastic.enabled=true",
    "fuse.realloc.weight_sync=shards",
    "fuse.realloc.checksums=true",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)


@pytest.fixture(scope="module", params=WHOLE)
def finished(request, verl_home: Path, forks: dict[str, str]) -> Finished:
    family = request.param
    make_task(verl_home, "grpo-cpu")
    done = run(
        verl_home,
        "grpo-cpu",
        *COMMAND,
        f"task_dir={write_task(verl_home, family)}",
        name=family,
        record=verl_home / f"{family}.numbers",
        recorder="rollout_recorder",
        forks=forks,
    )
    assert done.code == 0, done.output[-4000:]
    return done


def test_every_sample_is_trained_once_and_slices_compute_them_all(finished):
    assert {(a["samples"], a["missing"]) for a in finished.accounts().values()} == {(SAMPLES, 0)}
    for metrics in finished.metrics.values():
        assert metrics["fuse/streamed_samples"] == SAMPLES
        assert metrics["fuse/fallbacks"] == 0


def test_replicas_generate_with_the_probabilities_that_are_trained(finished, record_property):
    gaps = [metrics["training/rollout_probs_diff_max"] for metrics in finished.metrics.values()]
    record_property("gaps", gaps)
    print(finished.folder.name, gaps)
    assert max(gaps) < 1e-3


def test_every_parameter_of_a_replica_is_bitwise_as_it_was_trained(finished):
    import torch

    family = finished.folder.name
    numbers = finished.folder.with_name(f"{family}.numbers")
    before = None
    for step in range(1, STEPS + 1):
        ranks = [torch.load(numbers / f"actor_{step}_rank{rank}.pt") for rank in range(2)]
        trained = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
        wanted = of_vllm(finished.folder.parent / "tasks" / family, trained)
        for replica in range(2):
            held = torch.load(numbers / f"rollout_{replica}_{step}.pt")
            # vLLM 0.28 has experts in a module of their own.
            found = {name.replace(".routed_experts", ""): tensor for name, tensor in held.items()}
            assert found.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        assert before is None or not all(torch.equal(before[name], wanted[name]) for name in wanted)
        before = wanted
