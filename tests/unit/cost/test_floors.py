"""Floors are read off runs made from known floors."""

import dataclasses

import numpy as np
import pytest
from omegaconf import OmegaConf
from tables import TINY, table

from verl_fuse.cost.calibration import CPU_FLOORS, GRAPHS, EngineFloors
from verl_fuse.cost.floors import NO_FLOORS, fit_floors, generation_seconds, stage_errors, stage_seconds
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, RecordedStep, run_of
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.timeline import INFERENCE_STAGES, TRAIN_STAGES, Span, Timeline

TABLE = table()
COST = ProfiledCost.of(TABLE, Cluster(1, 2, TABLE.device, 1e10, 1e10, 1e10))
# How much of a call is that of its sequences is assumed, not found.
KNOWN = dataclasses.replace(
    NO_FLOORS,
    request=0.05,
    decode_step=0.02,
    call=CPU_FLOORS.call / 2,
    row=CPU_FLOORS.row / 2,
    microbatch=0.04,
    update=0.1,
    sync=0.2,
)
CONFIG = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
    "data": {"train_batch_size": 16},
    "actor_rollout_ref": {
        "rollout": {"log_prob_micro_batch_size_per_gpu": 4, "tensor_model_parallel_size": 1, "n": 2},
        "ref": {"log_prob_micro_batch_size_per_gpu": "${..rollout.log_prob_micro_batch_size_per_gpu}"},
        "actor": {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8},
    },
}


BY_SEQUENCES = {"micro_batch": dict.fromkeys((*INFERENCE_STAGES, *TRAIN_STAGES), 2)}
BY_TOKENS = {"budget": dict.fromkeys((*INFERENCE_STAGES, *TRAIN_STAGES), 100), "packed": True, "recompute": True}


def made_run(
    requests: int, seed: int, cut: dict, step: dict | None = None, floors: EngineFloors = KNOWN
) -> RecordedRun:
    """Stages by COST with these floors; one request is the longest on its replica by far."""
    cost, rng = dataclasses.replace(COST, engine=floors), np.random.default_rng(seed)
    run = RecordedRun(**{"name": f"made {seed}", "ranks": 2, "micro_batch": {}, "minibatches": 1, "steps": (), **cut})
    steps = []
    for _ in range(3):
        responses = rng.integers(1, 100, requests)
        responses[0] = rng.integers(150, 200)
        replicas = tuple(i % 2 for i in range(requests))
        made = RecordedStep({}, (9,) * requests, tuple(map(int, responses)), replicas, **(step or {}))
        stages = {stage: stage_seconds(run, made, stage, TINY, cost) for stage in (*INFERENCE_STAGES, *TRAIN_STAGES)}
        stages |= {"gen": generation_seconds(made, TINY, cost, run.tp, run.most), "update_weights": 0.2}
        steps.append(dataclasses.replace(made, stages=stages))
    return dataclasses.replace(run, steps=tuple(steps))


LEFT_OUT = {"computed": {"old_log_prob": 0.5, "update_actor": 0.3}, "tokens_per_pass": 1.8, "drafted": 2.5}


FEW = {**BY_SEQUENCES, "most": 3}
MASKED = {**BY_TOKENS, "masked": True}


@pytest.mark.parametrize("step", [{}, LEFT_OUT], ids=["stock", "features"])
@pytest.mark.parametrize(
    "cut", [BY_SEQUENCES, BY_TOKENS, FEW, MASKED], ids=["by sequences", "by tokens", "few at once", "masked"]
)
def test_known_floors_are_found(cut: dict, step: dict):
    runs = [made_run(16, 0, cut, step), made_run(128, 1, {**cut, "minibatches": 2}, step)]
    found = fit_floors(runs, TINY, COST)
    for name in ("call", "microbatch", "update", "decode_step", "request", "sync"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name
    cost = dataclasses.replace(COST, engine=found)
    for run in runs:
        for each in stage_errors(run, TINY, cost):
            assert each.predicted == pytest.approx(each.measured, rel=0.02), each.stage
            assert 0 < each.floors <= each.predicted


def test_a_request_waits_for_the_first_place_that_is_free():
    # On two places: passes 0 to 5 and 0 to 2, then 2 to 4, then 4 to 5.
    waiting = RecordedStep({}, (9,) * 4, (5, 2, 2, 1), (0,) * 4)
    floors = dataclasses.replace(NO_FLOORS, decode_step=1.0)
    free = dataclasses.replace(TABLE, models=())

    def passes(most: int | None) -> int:
        cost = ProfiledCost.of(dataclasses.replace(free, engine=floors), COST.cluster)
        return round(generation_seconds(waiting, TINY, cost, 1, most))

    assert [passes(most) for most in (1, 2, 3, 4, None)] == [10, 5, 5, 5, 5]
    longest_last = dataclasses.replace(waiting, responses=(1, 2, 2, 5))
    waiting = longest_last
    assert [passes(most) for most in (1, 2, 3, 4, None)] == [10, 7, 6, 5, 5]


# Of 0.06 s a call of 16 sequences and 0.04 s for each of 4 micro-batches, and 0.1 s an update.
CPU = (
    0.22 / (CPU_FLOORS.call + 16 * CPU_FLOORS.row + 4 * CPU_FLOORS.microbatch),
    0.1 / (CPU_FLOORS.update + 4 * CPU_FLOORS.backward),
)
ASSUMED = {
    "CPU": {
        "call": CPU[0] * CPU_FLOORS.call,
        "row": CPU[0] * CPU_FLOORS.row,
        "microbatch": CPU[0] * CPU_FLOORS.microbatch,
        "update": CPU[1] * CPU_FLOORS.update,
        "backward": CPU[1] * CPU_FLOORS.backward,
    },
    "H100": {"call": GRAPHS.call, "row": 0.0, "microbatch": 0.17 / 4, "update": GRAPHS.call, "backward": 0.05 / 4},
}


@pytest.mark.parametrize("device", ASSUMED)
def test_where_all_passes_have_as_many_micro_batches_floors_are_told_apart_by_what_is_assumed(device: str):
    run = made_run(16, 0, BY_SEQUENCES)
    cluster = dataclasses.replace(COST.cluster, device=dataclasses.replace(COST.cluster.device, name=device))
    found = fit_floors([run], TINY, dataclasses.replace(COST, cluster=cluster))
    assert {name: getattr(found, name) for name in ASSUMED[device]} == pytest.approx(ASSUMED[device], rel=0.1)
    cost = dataclasses.replace(COST, engine=found)
    for each in stage_errors(run, TINY, cost):
        assert each.predicted == pytest.approx(each.measured, rel=0.02), each.stage
    quick = dataclasses.replace(run, steps=tuple(with_stage(step, "old_log_prob", 1e-6) for step in run.steps))
    assert fit_floors([quick], TINY, COST).call == 0.0


def with_stage(step: RecordedStep, stage: str, seconds: float) -> RecordedStep:
    return dataclasses.replace(step, stages={**step.stages, stage: seconds})


def test_a_batch_of_more_sequences_is_foreseen_from_a_run_of_fewer():
    """On a CPU, whose calls take longer the more sequences they have."""
    known = dataclasses.replace(CPU_FLOORS, request=0.05, sync=0.2, overlap=False, handover=0.0)
    runs = [made_run(requests, seed, BY_SEQUENCES, floors=known) for seed, requests in enumerate((16, 32))]
    cluster = dataclasses.replace(COST.cluster, device=dataclasses.replace(COST.cluster.device, name="CPU"))
    cost = dataclasses.replace(COST, cluster=cluster)
    for of, run in (runs, runs[::-1]):
        found = dataclasses.replace(cost, engine=fit_floors([of], TINY, cost))
        errors = {each.stage: each.predicted / each.measured for each in stage_errors(run, TINY, found)}
        for stage in (*INFERENCE_STAGES, *TRAIN_STAGES):
            assert errors[stage] == pytest.approx(1.0, abs=0.05), stage


def test_without_a_pass_a_call_is_counted_with_its_updates():
    def trained(run: RecordedRun) -> RecordedRun:
        kept = {"gen", *TRAIN_STAGES}
        steps = (
            dataclasses.replace(step, stages={name: taken for name, taken in step.stages.items() if name in kept})
            for step in run.steps
        )
        return dataclasses.replace(run, steps=tuple(steps))

    found = fit_floors([trained(made_run(16, 0, BY_SEQUENCES)), trained(made_run(128, 1, BY_SEQUENCES))], TINY, COST)
    assert (found.call, found.sync) == (0.0, 0.0)
    # A micro-batch of both ranks has four sequences.
    assert found.microbatch == pytest.approx(KNOWN.microbatch + 4 * KNOWN.row, rel=0.02)
    assert found.update == pytest.approx(KNOWN.call + KNOWN.update, rel=0.02)


def test_steps_in_which_samples_moved_say_nothing_of_decoding():
    run = made_run(16, 0, BY_SEQUENCES)
    moved = tuple(
        dataclasses.replace(step, stages={name: s for name, s in step.stages.items() if name != "gen"})
        for step in run.steps
    )
    with pytest.raises(FuseError, match="samples moved between replicas in every recorded step"):
        fit_floors([dataclasses.replace(run, steps=moved)], TINY, COST)
    found = fit_floors(
        [dataclasses.replace(run, steps=(*moved, *run.steps)), made_run(128, 1, BY_SEQUENCES)], TINY, COST
    )
    assert found.decode_step == pytest.approx(KNOWN.decode_step, rel=0.02)


def test_no_floor_is_negative():
    """Stages that take less than their parts leave nothing to explain."""
    run = made_run(16, 0, BY_SEQUENCES)
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


def test_a_run_of_features_is_read_with_what_they_left_out():
    request = {"prompt_tokens": 10, "response_tokens": 30}
    spans = (
        *(Span(name, "step", "stage", i, i + 1) for i, name in enumerate(("gen", "old_log_prob", "ref", "values"))),
        Span("update_critic", "step", "stage", 4, 5, {"own_values": 0.25}),
        Span("update_actor", "step", "stage", 5, 6, {"own_log_probs": 0.5, "skipped_tokens": 0.2}),
        *(Span("request", f"replica {i}", "generate", 0, 1, request) for i in range(2)),
    )
    metrics = {
        "fuse/update_shared_tokens": 0.4,
        "fuse/ref_shared_tokens": 0.8,
        "fuse/speculation_drafted_tokens": 75.0,
        "fuse/speculation_tokens_per_pass": 2.0,
    }
    step = RecordedStep.of(Timeline("run", 2, 0, 6, spans), metrics)
    # A quarter of the tokens are prompts'.
    assert step.computed == pytest.approx({"old_log_prob": 0.5, "ref": 0.8, "values": 0.75, "update_actor": 0.8 * 0.9})
    # 30 passes for 60 tokens.
    assert (step.tokens_per_pass, step.drafted, list(step.passes)) == (2.0, 2.5, [15, 15])
    sliced = Span("micro-group", "lane slice 0", "inference", 0, 1)
    elsewhere = (*spans, sliced, Span("stream_update", "lane train", "train", 0, 1))
    assert list(RecordedStep.of(Timeline("run", 2, 0, 6, elsewhere)).stages) == ["gen", "update_critic"]
    moved = Span("request", "replica 1", "generate", 0, 1, {**request, "resumed_tokens": 4})
    assert "gen" not in RecordedStep.of(Timeline("run", 2, 0, 6, (*spans, moved))).stages


def logged(mean: float = 40.0, most: float = 200.0) -> dict[str, float]:
    return {
        "timing_s/step": 5.0,
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 1.5,
        "timing_s/update_critic": 0.0,
        "prompt_length/mean": 9.0,
        "prompt_length/max": 9.0,
        "response_length/mean": mean,
        "response_length/max": most,
    }


def test_a_run_without_timelines_is_read_from_verls_log():
    metrics = {step: logged() for step in (3, 2, 1)} | {0: {"val-core/acc/mean": 0.5}}
    run = run_of("run", OmegaConf.create(CONFIG), [], metrics)
    assert (len(run.steps), run.micro_batch, run.minibatches) == (2, {"update_actor": 8}, 2)
    step = run.steps[0]
    assert step.stages == {"gen": 2.0, "update_actor": 1.5}
    # 16 prompts, two samples each, on two replicas.
    assert (len(step.responses), set(step.prompts), step.replicas[:3]) == (32, {9}, (0, 1, 0))
    assert max(step.responses) == 200
    assert np.mean(step.responses) == pytest.approx(40, rel=0.05)
    assert RecordedStep.logged(logged(most=40), 4, 1).responses == (40,) * 4
    # No lognormal distribution of four has so large a maximum; its own largest is taken.
    assert max(RecordedStep.logged(logged(most=4000), 4, 1).responses) < 4000
    with pytest.raises(FuseError, match=r"response_length/mean=0, .*needs lengths as verl logs them"):
        RecordedStep.logged(logged(mean=0), 4, 1)


def test_micro_batches_are_read_as_verl_reads_them():
    config = OmegaConf.create(CONFIG)
    for key, value in {
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 20,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": None,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "critic.ppo_micro_batch_size_per_gpu": 1,
    }.items():
        OmegaConf.update(config, key, value, force_add=True)
    # A key of another engine.
    OmegaConf.update(config, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 2, force_add=True)
    passes = tuple(Span(name, "step", "stage", 3, 4) for name in ("old_log_prob", "values"))
    steps = [Timeline("run", n, 0, 4, (*timeline(n).spans, *passes)) for n in (1, 2)]
    run = run_of("run", config, steps)
    assert (run.micro_batch, run.budget) == ({"ref": 3}, {"old_log_prob": 20, "values": 32768})
    assert (run.packed, run.recompute, run.tp) == (True, True, 2)
    # 26 tokens on two ranks; at the bound and beyond it.
    assert run.microbatches("old_log_prob", run.steps[0]) == 1
    assert dataclasses.replace(run, budget={"old_log_prob": 13}).microbatches("old_log_prob", run.steps[0]) == 1
    assert dataclasses.replace(run, budget={"old_log_prob": 12}).microbatches("old_log_prob", run.steps[0]) == 2
    assert (run.batch("ref", run.steps[0]).tokens, run.batch("old_log_prob", run.steps[0]).tokens) == (26, 26)
    assert dataclasses.replace(run, packed=False).batch("ref", run.steps[0]).tokens == 28
    # Without flash attention the 13 tokens of each rank attend to each other.
    assert dataclasses.replace(run, masked=True).batch("ref", run.steps[0]).squares == 2 * 13**2
    assert (run.masked, run.most) == (False, None)
    OmegaConf.update(config, "trainer.device", "cpu", force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.rollout.max_num_seqs", 64, force_add=True)
    run = run_of("run", config, steps)
    assert (run.masked, run.most) == (True, 64)


FSDP = {"strategy": "fsdp2", "fsdp_config": {"ulysses_sequence_parallel_size": 2}}
WITH_CRITIC = {"algorithm.adv_estimator": "gae", "critic": {"strategy": "fsdp2", "ppo_mini_batch_size": 8}}


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({}, [1], "needs at least two"),
        ({"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": None}, [1, 2], "=None; the floors of a run need"),
        (
            {"fuse.placement.critic": {"first": 1, "devices": 1}},
            [1, 2],
            "fuse.placement.critic=.*need actor and critic on all ranks",
        ),
        ({"actor_rollout_ref.actor": FSDP}, [1, 2], "share a sequence of actor_rollout_ref.actor=2; .* need 1"),
        ({**WITH_CRITIC, "critic.fsdp.ulysses_sequence_parallel_size": 4}, [1, 2], "share a sequence of critic=4; "),
        ({**WITH_CRITIC, "critic.ppo_epochs": 2}, [1, 2], "critic.ppo_epochs=2; the floors of a run need 1"),
        ({**WITH_CRITIC, "critic.ppo_mini_batch_size": 16}, [1, 2], "critic.ppo_mini_batch_size: .* the actor's"),
    ],
)
def test_a_run_that_says_too_little_is_refused(changes: dict, steps: list[int], message: str):
    config = OmegaConf.create(CONFIG)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(FuseError, match=message):
        run_of("run", config, [timeline(step) for step in steps])
