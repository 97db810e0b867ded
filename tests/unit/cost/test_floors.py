"""Floors are read off runs made from known floors."""

import dataclasses

import numpy as np
import pytest
from omegaconf import OmegaConf
from tables import TINY, table

from verl_fuse.cost.floors import NO_FLOORS, fit_floors, generation_seconds, stage_seconds
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, RecordedStep, run_of
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.timeline import INFERENCE_STAGES, TRAIN_STAGES, Span, Timeline

TABLE = table()
COST = ProfiledCost.of(TABLE, Cluster(1, 2, TABLE.device, 1e10, 1e10, 1e10))
KNOWN = dataclasses.replace(NO_FLOORS, request=0.05, decode_step=0.02, call=0.06, microbatch=0.04, update=0.1, sync=0.2)
CONFIG = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
    "data": {"train_batch_size": 16},
    "actor_rollout_ref": {
        "rollout": {"log_prob_micro_batch_size_per_gpu": 4},
        "ref": {"log_prob_micro_batch_size_per_gpu": "${..rollout.log_prob_micro_batch_size_per_gpu}"},
        "actor": {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8},
    },
}


def made_run(requests: int, micro: int, seed: int) -> RecordedRun:
    """Stages by COST with the floors KNOWN; one request is the longest on its replica by far."""
    cost, rng = dataclasses.replace(COST, engine=KNOWN), np.random.default_rng(seed)
    run = RecordedRun(f"made {seed}", 2, {stage: micro for stage in (*INFERENCE_STAGES, *TRAIN_STAGES)}, 1, ())
    steps = []
    for _ in range(3):
        responses = rng.integers(1, 100, requests)
        responses[0] = rng.integers(150, 200)
        step = RecordedStep({}, (9,) * requests, tuple(map(int, responses)), tuple(i % 2 for i in range(requests)))
        stages = {stage: stage_seconds(run, step, stage, TINY, cost) for stage in (*INFERENCE_STAGES, *TRAIN_STAGES)}
        stages |= {"gen": generation_seconds(step, TINY, cost), "update_weights": 0.2}
        steps.append(dataclasses.replace(step, stages=stages))
    return dataclasses.replace(run, steps=tuple(steps))


def test_known_floors_are_found():
    found = fit_floors([made_run(16, 2, 0), made_run(128, 32, 1)], TINY, COST)
    for name in ("call", "microbatch", "update", "decode_step", "request", "sync"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name


def test_no_floor_is_negative():
    """Stages that take less than their parts leave nothing to explain."""
    run = made_run(16, 2, 0)
    steps = tuple(
        dataclasses.replace(s, stages=dict.fromkeys(s.stages.keys() - {"update_weights"}, 1e-6)) for s in run.steps
    )
    found = fit_floors([dataclasses.replace(run, steps=steps)], TINY, COST)
    assert dataclasses.asdict(found) == dataclasses.asdict(NO_FLOORS)


def timeline(step: int) -> Timeline:
    request = {"prompt_tokens": 9, "response_tokens": 3}
    spans = (
        Span("gen", "step", "stage", 0, 2),
        Span("ref", "step", "stage", 2, 3),
        Span("request", "replica 3", "generate", 0, 1, request),
        Span("request", "replica 1", "generate", 0, 2, {**request, "response_tokens": 5}),
    )
    return Timeline("run", step, 0, 3, spans)


@pytest.mark.parametrize(
    "stages",
    [(), (Span("gen", "step", "stage", 0, 2), Span("ref", "step", "stage", 2, 2))],
    ids=["no gen", "ref of 0 s"],
)
def test_a_step_whose_stages_cannot_be_weighed_is_refused(stages: tuple[Span, ...]):
    requests = tuple(span for span in timeline(2).spans if span.name == "request")
    with pytest.raises(FuseError, match=r"step 2 of 'run': stages in seconds \{.*\}; needs gen, and none of 0 s"):
        RecordedStep.of(Timeline("run", 2, 0, 3, (*stages, *requests)))


def test_a_run_is_read_from_its_configuration_and_timelines():
    run = run_of("run", OmegaConf.create(CONFIG), [timeline(1), timeline(2)])
    assert (run.ranks, run.minibatches, run.micro_batch) == (2, 2, {"ref": 4})
    assert run.steps == (RecordedStep({"gen": 2.0, "ref": 1.0}, (9, 9), (5, 3), (0, 1)),)
    assert run.microbatches("ref", run.steps[0]) == 1


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({}, [1], "needs at least two"),
        ({"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": None}, [1, 2], "=None; the floors of a run need"),
        ({"fuse.placement.critic": {"first": 1, "devices": 1}}, [1, 2], "need a critic on all ranks"),
    ],
)
def test_a_run_that_says_too_little_is_refused(changes: dict, steps: list[int], message: str):
    config = OmegaConf.create(CONFIG)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(FuseError, match=message):
        run_of("run", config, [timeline(step) for step in steps])
