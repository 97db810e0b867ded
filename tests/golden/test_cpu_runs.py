"""Stage times of the CPU recipes, predicted from a profile of the machine that ran them.

The profile holds the parts of the model and, as floors of the software, what ppo-small and grpo-large took beyond them:
other batch sizes and micro-batches of the same recipes. Held out: every stage of ppo-cpu and grpo-cpu.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from verl_fuse.cost.floors import fit_floors, generation_seconds, stage_seconds
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, RecordedStep
from verl_fuse.cost.table import ProfileTable
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.timeline import INFERENCE_STAGES, TRAIN_STAGES

HERE = Path(__file__).parent
TABLE = ProfileTable.read(HERE / "cpu_profile.json")
TINY = TABLE.models[0].model


def recorded_runs() -> dict[str, RecordedRun]:
    data = json.loads((HERE / "cpu_runs.json").read_text())["runs"]
    return {run["name"]: RecordedRun(**{**run, "steps": tuple(map(recorded_step, run["steps"]))}) for run in data}


def recorded_step(data: dict) -> RecordedStep:
    count = len(data["responses"])
    return RecordedStep(
        data["stages"], (data["prompts"],) * count, tuple(data["responses"]), tuple(map(int, data["replicas"]))
    )


def predict(run: RecordedRun, step: RecordedStep, stage: str, cost: ProfiledCost) -> float:
    if stage == "gen":
        return generation_seconds(step, TINY, cost, run.tp, run.most)
    if stage == "update_weights":
        return cost.sync(TINY, (Mesh(0, 2), Layout(dp=2)), (Mesh(0, 2), Layout(dp=2)))
    return stage_seconds(run, step, stage, TINY, cost)


def test_held_out_stage_times():
    runs = recorded_runs()
    bare = ProfiledCost.of(TABLE, Cluster(1, 2, TABLE.device, *(TABLE.device.bandwidth,) * 3))
    cost = dataclasses.replace(bare, engine=fit_floors([runs["ppo-small"], runs["grpo-large"]], TINY, bare))
    errors = []
    for run in (runs["ppo-cpu"], runs["grpo-cpu"]):
        for stage in (
            "gen",
            "update_weights",
            *(name for name in (*INFERENCE_STAGES, *TRAIN_STAGES) if name in run.micro_batch),
        ):
            predicted = [predict(run, step, stage, cost) for step in run.steps]
            errors.append(abs(np.mean(predicted) / np.mean([step.stages[stage] for step in run.steps]) - 1))
    assert len(errors) == 12
    assert np.median(errors) < 0.20
    assert max(errors) < 0.45
