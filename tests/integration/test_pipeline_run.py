"""A run of the recipe `ppo-megatron-cpu` on real verl, Ray, Megatron and vLLM: one RPC updates critic and actor,
first measured, then fused.

On two ranks of two stages; test_pipeline_engines.py has four. Shows the invariants in the docstring
of plugins/verl_fuse_pipeline/fused.py; and that replicas which get the stages' shards generate with what
was trained, in every step.
"""

from collections import Counter
from pathlib import Path

import pytest
from verl_runs import run

from verl_fuse.spec.timeline import Timeline

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.integration

RANKS = 2
# The replicas of the third step generate with the weights of the first fused update.
STEPS = 3


def test_the_first_update_is_measured_and_later_ones_are_fused(verl_home: Path, forks: dict[str, str]):
    finished = run(
        verl_home,
        "ppo-megatron-cpu",
        f"trainer.n_gpus_per_node={RANKS}",
        f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={RANKS}",
        f"critic.megatron.pipeline_model_parallel_size={RANKS}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "fuse.pipeline.schedule=fused",
        "fuse.pipeline.solve_seconds=1",
        "fuse.realloc.weight_sync=shards",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        name="fused",
        record=verl_home / "fused.numbers",
        recorder="solved_schedules",
        forks=forks,
    )
    assert finished.code == 0, finished.output[-3000:]
    calls = {step: found["fuse/pipeline_fused_calls"] for step, found in finished.metrics.items() if step}
    assert calls == {1: 0, 2: 2, 3: 2}
    first, last = (finished.metrics[step] for step in (1, STEPS))
    assert first["fuse/pipeline_calls"] == last["fuse/pipeline_calls"] == 2
    for metrics in (first, last):
        assert {"actor/grad_norm", "actor/loss", "critic/grad_norm", "critic/loss"} <= metrics.keys()
    for step in range(1, STEPS + 1):
        assert finished.metrics[step]["training/rollout_probs_diff_max"] < 0.01, step
    timeline = Timeline.from_json((finished.folder / "timeline" / f"step_{STEPS:06d}.json").read_text())
    # Two mini-batches, four micro-batches, forwards and backwards of two models.
    for rank in range(RANKS):
        ops = [span for span in timeline.on(f"rank {rank}") if "op" in span.args]
        plan = timeline.on(f"plan {rank}")
        assert len(ops) == 2 * 4 * 2 * 2
        # The timeline leaves out ops that were predicted for a time after the step's end.
        assert len(plan) > 0
        assert Counter(span.name for span in plan) <= Counter(span.name for span in ops)
    assert [span.name for span in timeline.on("step")].count("fused_update") == 1
    for rank in range(RANKS):
        assert [span.category for span in timeline.on(f"rank {rank}") if span.name == "shards"] == ["sync"]
