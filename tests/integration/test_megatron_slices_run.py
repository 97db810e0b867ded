"""PPO on Megatron with slices: devices of released replicas run inference while others generate, and every number is
computed again.

Two ranks train a fused pipeline of two stages and have a replica each, so copies are whole; four train two copies of
each model with tensor parallelism for replicas of two devices, so a slice's copies are cut like the models. Real verl,
Ray, Megatron and vLLM.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.forced_lengths import forced_length
from verl_runs import Finished, make_task, run

from verl_fuse.spec.timeline import Timeline
from verl_fuse.spec.trajectory import TrajectoryKey

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
LONG = os.environ.get("VERL_FUSE_LONG") == "1"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not LONG, reason="VERL_FUSE_LONG=1 runs PPO on Megatron with slices"),
]

STEPS = 2
PROMPTS = 8
SAMPLES = 4 * PROMPTS
THRESHOLD = 10
RECIPE = "ppo-megatron-cpu"
FIELDS = ("old_log_probs", "ref_log_prob", "values")


def even_task(home: Path) -> Path:
    """The recipe's task with a token more, so that two ranks can share the vocabulary."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = home / "tasks/megatron-slices"
    if not made.exists():
        make_task(home, RECIPE)
        shutil.copytree(home / "tasks/euclid-4-layers", made)
        tokenizer = AutoTokenizer.from_pretrained(made / "model")
        tokenizer.add_tokens(["<|even|>"])
        model = AutoModelForCausalLM.from_pretrained(made / "model")
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(made / "model")
        tokenizer.save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module", params=[2, 4], ids=["pp2, whole copies", "tp2 dp2, tp2 copies"])
def finished(request, verl_home: Path, forks: dict[str, str]) -> Finished:
    ranks = request.param
    backend = "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend"
    done = run(
        verl_home,
        RECIPE,
        f"task_dir={even_task(verl_home)}",
        f"trainer.n_gpus_per_node={ranks}",
        *(
            f"{block}.megatron.{kind}_model_parallel_size={size}"
            for block in ("actor_rollout_ref.actor", "critic")
            for kind, size in (("tensor", ranks // 2), ("pipeline", 4 // ranks))
        ),
        *((f"{backend}=mp", "actor_rollout_ref.rollout.tensor_model_parallel_size=2") if ranks == 4 else ()),
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.megatron.infer_micro_batch_size_per_gpu=4",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        # Two ranks train both models as one pipeline, whose engines live in views of their own.
        f"fuse.pipeline.enabled={str(ranks == 2).lower()}",
        "fuse.interstage.enabled=true",
        f"fuse.interstage.migration_threshold={THRESHOLD}",
        "fuse.interstage.layout=slices",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        name=f"sliced{ranks}",
        record=verl_home / f"sliced{ranks}.numbers",
        recorder="long_tail",
        variables={"STOCK_AGAIN": "1"},
        forks=forks,
    )
    assert done.code == 0, done.output[-4000:]
    return done


def numbers(finished: Finished, step: int) -> dict:
    return torch.load(finished.folder.with_name(f"{finished.folder.name}.numbers") / f"step_{step}.pt")


def furthest(one: list, other: list) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_every_sample_is_trained_once_with_all_its_tokens(finished):
    assert {(a["samples"], a["missing"]) for a in finished.accounts().values()} == {(SAMPLES, 0)}
    for step in range(1, STEPS + 1):
        record = numbers(finished, step)
        rows = [row for row, tag in enumerate(record["tags"]) if not tag.get("is_padding")]
        assert Counter(record["keys"][row] for row in rows).most_common(1)[0][1] == 1
        assert len(rows) == SAMPLES
        for row in rows:
            length = forced_length(record["index"][row], TrajectoryKey.parse(record["keys"][row]).session)
            assert len(record["given"]["responses"][row]) == length


def test_the_freed_devices_run_inference_while_the_survivor_finishes_the_tail(finished):
    early: set[str] = set()
    for step in range(1, STEPS + 1):
        spans = Timeline.from_json((finished.folder / f"timeline/step_{step:06d}.json").read_text())
        metrics = finished.metrics[step]
        assert metrics["fuse/streamed_samples"] == SAMPLES
        assert metrics["fuse/slice_weight_bytes"] > 0
        (generation,) = [span for span in spans.on("step") if span.name == "gen"]
        work = [span for number in (0, 1) for span in spans.on(f"slice {number}") if span.category == "inference"]
        assert {span.name for span in work} == {"old_log_prob", "ref", "values"}
        early |= {span.name for span in work if span.start < generation.end}
    # On a busy machine a step's tail may end soon after its device is freed, before the call's second stage.
    assert max(metrics["fuse/overlap_seconds"] for metrics in finished.metrics.values()) > 0
    assert "old_log_prob" in early


def test_slices_compute_what_stock_verl_computes(finished, record_property):
    """As far as two of verl's own calls with the same weights agree, rows in another order."""
    for step in range(1, STEPS + 1):
        record = numbers(finished, step)
        far = {field: furthest(record["fused"][field], record["stock"][field]) for field in FIELDS}
        apart = {field: furthest(record["again"][field], record["stock"][field]) for field in FIELDS}
        record_property(f"step {step}", {"slices": far, "two stock calls": apart})
        print(step, "slices", far, "two stock calls", apart)
        assert all(far[field] <= 2 * apart[field] + 1e-3 for field in FIELDS), (step, far, apart)
