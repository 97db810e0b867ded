"""The CPU recipes, simulated from the profile of the machine that ran them; `pytest -s` prints the table of
verl_fuse/simulate/README.md.

Calibration: the parts of the model as profiled, and the floors read off ppo-small and grpo-large. Given: the lengths
the runs had. Held out: every stage of ppo-cpu and grpo-cpu, and which of stock, observed and streaming is faster.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from test_cpu_runs import TABLE, TINY, recorded_runs

from verl_fuse.cost.floors import fit_floors
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.step import simulate_step
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.workload import Workload

STAGES = {
    "actor_infer": "old_log_prob",
    "reference_infer": "ref",
    "critic_infer": "values",
    "critic_train": "update_critic",
}
STREAMING = json.loads(Path(__file__).with_name("cpu_streaming.json").read_text())
OPTIONS = SimulationOptions(padded=True, recompute=False, max_num_seqs=64, max_num_batched_tokens=1024)
SEEDS = 32


@pytest.fixture(scope="module")
def runs() -> dict[str, RecordedRun]:
    return recorded_runs()


@pytest.fixture(scope="module")
def cost(runs) -> ProfiledCost:
    bare = ProfiledCost.of(TABLE, Cluster(1, 2, TABLE.device, *(TABLE.device.bandwidth,) * 3))
    return dataclasses.replace(bare, engine=fit_floors([runs["ppo-small"], runs["grpo-large"]], TINY, bare))


def workload_of(run: RecordedRun) -> tuple[Workload, Plan]:
    """The recipe's step with the lengths that were recorded, on two ranks."""
    has_critic = "values" in run.micro_batch
    workload = Workload(
        "ppo" if has_critic else "grpo",
        prompts=len(run.steps[0].responses) // 4,
        samples=4,
        prompt=LengthDistribution.of([length for step in run.steps for length in step.prompts]),
        response=LengthDistribution.of([length for step in run.steps for length in step.responses]),
        actor=TINY,
        critic=TINY.as_value_model() if has_critic else None,
        reference=TINY,
    )
    micro_batch = {call: run.micro_batch.get(stage) for call, stage in STAGES.items()}
    micro_batch["actor_train"] = run.micro_batch["update_actor"]
    calls = [CallPlan("actor_generate", Mesh(0, 2), Layout(dp=2))]
    for call in workload.calls[1:]:
        microbatches = -(-workload.sequences // 2 // (micro_batch[call.name] or 1))
        calls.append(CallPlan(call.name, Mesh(0, 2), Layout(dp=2), microbatches))
    return workload, Plan(tuple(calls))


def stage_means(run: RecordedRun, cost: ProfiledCost, strategy: str, seeds: int = SEEDS) -> dict[str, float]:
    workload, plan = workload_of(run)
    results = [
        simulate_step(workload, plan, cost, strategy, np.random.default_rng(seed), OPTIONS).stages
        for seed in range(seeds)
    ]
    return {name: float(np.mean([stages[name] for stages in results])) for name in results[0]}


def test_stage_times(runs, cost):
    errors = []
    for name in ("ppo-cpu", "grpo-cpu"):
        predicted = stage_means(runs[name], cost, "observe")
        for stage in predicted.keys() & runs[name].steps[0].stages.keys() - {"update_weights"}:
            recorded = float(np.mean([step.stages[stage] for step in runs[name].steps]))
            errors.append(abs(predicted[stage] / recorded - 1))
            print(
                f"| {name} | {stage} | {recorded:.2f} | {predicted[stage]:.2f} | "
                f"{predicted[stage] / recorded - 1:+.0%} |"
            )
    print(f"median error {np.median(errors):.0%}, largest {max(errors):.0%}")
    assert len(errors) == 10
    assert np.median(errors) <= 0.25


def test_streaming_on_saturated_cores_ranks_as_measured(runs, cost):
    measured = STREAMING["generation_and_inference_seconds"]
    predicted = {}
    for strategy in measured:
        stages = stage_means(runs["ppo-cpu"], cost, strategy)
        predicted[strategy] = STREAMING["steps"] * sum(stages[s] for s in ("gen", "old_log_prob", "ref", "values"))
        print(f"| {strategy} | {measured[strategy]} | {predicted[strategy]:.1f} |")
    assert sorted(predicted, key=predicted.__getitem__) == sorted(measured, key=measured.__getitem__)
