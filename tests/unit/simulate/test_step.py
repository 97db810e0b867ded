"""Whole steps under every strategy."""

import math
from dataclasses import replace

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.drafter import FIGURES
from verl_fuse.errors import FuseError
from verl_fuse.simulate.options import SIMULATED_STRATEGIES, SimulationOptions, of_plan
from verl_fuse.simulate.placement import is_apart
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.composed import ROLLOUT
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan

WORKLOADS = {"ppo": ppo(), "grpo": grpo(), "no old log-prob": ppo(old_log_prob=False, epochs=2)}


def run(
    workload,
    strategy: str,
    options: SimulationOptions = NO_POLL,
    plan: Plan | None = None,
    seed: int = 0,
    cost: AnalyticCost = h100(),  # noqa: B008 - frozen
):
    return simulate_step(
        workload, plan or stock_plan(workload, cost, options), cost, strategy, np.random.default_rng(seed), options
    )


@pytest.mark.parametrize("strategy", SIMULATED_STRATEGIES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_adds_up(name: str, strategy: str):
    result = run(WORKLOADS[name], strategy)
    assert 0 <= result.idle <= 1
    assert result.seconds >= max(p.end - p.start for p in result.placed)
    if strategy == "placement" and is_apart(result.plan):
        assert result.seconds < sum(result.stages.values()), "the critic is trained beside generation"
        return
    assert result.seconds == pytest.approx(sum(result.stages.values()))
    assert 0 < result.device_seconds <= 16 * result.seconds + 1e-9
    assert result.cost == pytest.approx(result.device_seconds / 3600 * 2.8)
    assert result.generation_and_inference + result.training <= result.seconds + 1e-9


def test_stock_is_one_stage_after_the_other():
    result = run(ppo(), "stock")
    assert list(result.stages) == [
        "gen", "reward", "ref", "values", "old_log_prob", "update_critic", "update_actor", "update_weights",
    ]  # fmt: skip
    assert result.device_seconds == pytest.approx(16 * result.seconds)
    assert result.generation.inference_end is None


def test_realloc_alone_is_the_plan_it_is_given():
    assert run(ppo(), "realloc", replace(NO_POLL, fuse_poll=0.0)).seconds == run(ppo(), "stock").seconds


def test_drafts_shorten_generation_and_only_that():
    options = replace(NO_POLL, acceptance=0.9)
    workload = grpo()
    stock, ours = run(workload, "stock"), run(workload, "speculation", options)
    assert run(workload, "stock", options).seconds == stock.seconds, "stock verl has no drafts"
    assert run(workload, "speculation").seconds == run(workload, "observe").seconds, (
        "without an acceptance nothing is drafted"
    )
    assert ours.stages["gen"] < 0.8 * stock.stages["gen"]
    assert ours.stages["update_actor"] == stock.stages["update_actor"]
    assert (stock.notes, ours.notes) == ((), (FIGURES,))


def test_a_drafter_that_finds_nothing_costs_its_passes_on_accelerators_alone():
    vain, workload = replace(NO_POLL, acceptance=0.0), grpo()
    stock, ours = run(workload, "stock"), run(workload, "speculation", vain)
    assert 1.2 < ours.stages["gen"] / stock.stages["gen"] < 2.1
    host = AnalyticCost(replace(h100().cluster, device=replace(h100().cluster.device, name="CPU")))
    stock, ours = run(workload, "stock", cost=host), run(workload, "speculation", vain, cost=host)
    assert ours.seconds == stock.seconds
    assert ours.notes == ()


def test_samples_without_a_gradient_are_not_trained_on():
    workload = replace(ppo(), zero_gradient=0.4)
    stock, ours = run(workload, "stock"), run(workload, "zero_gradient", replace(NO_POLL, fuse_poll=0.0))
    assert stock.seconds == run(ppo(), "stock").seconds, "stock verl trains on them"
    kept = ours.stages["update_actor"] / stock.stages["update_actor"]
    assert 0.6 < kept < 0.65, "the optimizer steps as ever"
    assert ours.stages["update_critic"] == stock.stages["update_critic"]
    assert "40% of the samples have no gradient" in ours.notes


def test_metrics_of_stock_verl_take_a_forward_pass_of_samples_without_a_gradient():
    options, workload = replace(NO_POLL, fuse_poll=0.0), replace(ppo(), zero_gradient=0.4)
    strategy = "zero_gradient+old_log_prob"
    stock, computed, ours = (run(workload, name, options) for name in ("stock", strategy, f"{strategy}+stock_metrics"))
    saved = [stock.stages["update_actor"] - each.stages["update_actor"] for each in (computed, ours)]
    assert saved[1] == pytest.approx(2 / 3 * saved[0])
    assert ours.stages["old_log_prob"] == pytest.approx(computed.stages["old_log_prob"] / 0.6)
    assert "40% of the samples have no gradient, and a forward pass for their metrics" in ours.notes


def test_old_log_probs_of_the_first_mini_batch_are_left_out():
    options = replace(NO_POLL, fuse_poll=0.0)
    one = replace(ppo(), minibatches=1)
    ours = run(one, "old_log_prob", options)
    assert "old_log_prob" not in ours.stages
    assert run(one, "stock").seconds - ours.seconds == pytest.approx(run(one, "stock").stages["old_log_prob"], rel=0.01)
    twice = replace(one, epochs=2)
    assert "old_log_prob" not in run(twice, "old_log_prob", options).stages
    four, some = replace(one, minibatches=4), replace(one, minibatches=4, zero_gradient=0.5)
    stock, ours = run(four, "stock"), run(four, "old_log_prob", options)
    assert ours.stages["old_log_prob"] == pytest.approx(0.75 * stock.stages["old_log_prob"])
    assert stock.seconds - ours.seconds == pytest.approx(0.25 * stock.stages["old_log_prob"], rel=0.01)
    assert "old log-probs of 3 of 4 mini-batches are needed" in ours.notes
    for strategy in ("zero_gradient+old_log_prob", "old_log_prob"):
        # A loss that trains all of them (KL) needs no more old log-probs.
        ours = run(some, strategy, options)
        assert ours.stages["old_log_prob"] == pytest.approx(0.375 * stock.stages["old_log_prob"])
        assert "old log-probs of 3 of 4 mini-batches are needed, of samples with a gradient" in ours.notes
    assert run(one, "zero_gradient+old_log_prob", options).seconds == run(one, "old_log_prob", options).seconds


def test_values_of_the_first_mini_batch_are_left_out():
    options = replace(NO_POLL, fuse_poll=0.0)
    one = replace(ppo(), minibatches=1)
    stock, ours = run(one, "stock"), run(one, "values", options)
    assert "values" not in ours.stages
    assert stock.seconds - ours.seconds == pytest.approx(stock.stages["values"], rel=0.01)
    assert "values" not in run(replace(one, epochs=2), "values", options).stages
    four = replace(one, minibatches=4)
    stock, ours = run(four, "stock"), run(four, "values", options)
    assert ours.stages["values"] == pytest.approx(0.75 * stock.stages["values"])
    assert stock.seconds - ours.seconds == pytest.approx(0.25 * stock.stages["values"], rel=0.01)
    assert "values of 3 of 4 mini-batches are needed" in ours.notes
    assert "no critic is trained" in run(ON_POLICY, "values", options).notes
    (critic, actor) = (call for call in replace(one, values=False).calls if call.kind == "train")
    assert critic.name in actor.after, "the actor's advantages are made of the values"


ON_POLICY = grpo(reference=None, minibatches=1)


def in_fours(workload) -> Plan:
    """Stock, with replicas of four devices."""
    plan = stock_plan(workload, h100(), NO_POLL)
    return replace(plan, calls=(CallPlan("actor_generate", Mesh(0, 16), Layout(tp=4, dp=4)), *plan.calls[1:]))


def test_an_update_is_streamed_into_the_tail_where_copies_fit():
    plan = in_fours(ON_POLICY)
    base, copies, ours = (run(ON_POLICY, name, plan=plan) for name in ("old_log_prob", "copies", "stream"))
    assert ours.seconds < copies.seconds
    assert ours.stages["gen"] == base.stages["gen"]
    assert ours.stages["update_actor"] < copies.stages["update_actor"]
    assert copies.notes == ("a copy of the actor on each replica: actor_rollout_ref.actor.fsdp_config.fsdp_size=4",)
    assert "of the update is done in calls that begin before generation ends" in ours.notes[1]
    alone = run(ON_POLICY, "stream", replace(NO_POLL, dedicated=False), plan)
    assert alone.seconds == pytest.approx(copies.seconds)
    # A migration frees whole replicas for it.
    moved = run(ON_POLICY, "stream+interstage", plan=plan)
    assert moved.generation.moves
    assert moved.seconds < copies.seconds


def test_an_update_that_cannot_be_streamed_is_stock_with_the_reason():
    in_ones = run(ON_POLICY, "stream", plan=_with_rollout(stock_plan(ON_POLICY, h100(), NO_POLL), Layout(dp=16)))
    assert in_ones.notes[0].startswith("141.8 GiB")
    assert in_ones.generation.streamed is None
    waiting = grpo(minibatches=1)
    plan = in_fours(waiting)
    assert "with interstage" in run(waiting, "stream", plan=plan).notes[1]
    assert run(waiting, "stream", plan=plan).seconds == pytest.approx(run(waiting, "copies", plan=plan).seconds)
    both = run(waiting, "stream+interstage", plan=plan)
    assert both.generation.streamed is not None
    assert both.generation.streamed.share > 0
    assert both.seconds < run(waiting, "copies", plan=plan).seconds


def test_interstage_hides_inference_behind_the_tail():
    stock, fused = run(ppo(), "stock"), run(ppo(), "interstage")
    assert fused.seconds < stock.seconds
    assert fused.training == pytest.approx(stock.training)
    assert "tail of" in fused.notes[0]


def test_on_shared_saturated_devices_interstage_is_stock():
    options = replace(NO_POLL, dedicated=False)
    fused = run(ppo(), "interstage", options)
    assert fused.seconds == pytest.approx(run(ppo(), "stock", options).seconds)
    assert fused.notes == ("no tail is moved: no migration is predicted to gain",)


def test_the_driver_sees_the_end_of_generation_when_it_looks():
    exact, polled = run(ppo(), "stock"), run(ppo(), "stock", SimulationOptions(stock_poll=2.0))
    assert polled.stages["gen"] == pytest.approx(2.0 * np.ceil(exact.stages["gen"] / 2.0))


def test_elastic_actors_cost_less():
    stock, elastic = run(grpo(), "stock"), run(grpo(), "scaling")
    assert elastic.device_seconds < stock.device_seconds


def apart(workload) -> Plan:
    """Generation and actor on the left half, everything else on the right."""
    left, right = Mesh(0, 8), Mesh(8, 8)
    place = {"actor_generate": (left, Layout(dp=8)), "actor_train": (left, Layout(tp=2, pp=4))}
    other = (right, Layout(tp=4, pp=2))
    return Plan(tuple(CallPlan(c.name, *place.get(c.name, other), microbatches=4) for c in workload.calls))


def test_calls_on_other_devices_overlap_and_weights_move():
    workload = ppo()
    result = run(workload, "realloc", plan=apart(workload))
    times = {p.task.name: (p.start, p.end) for p in result.placed}
    assert times["actor_train"][0] < times["critic_train"][1]
    assert "actor_infer weights" in times
    assert times["actor_infer weights"][1] <= times["actor_infer"][0]
    assert result.stages["update_weights"] > 0
    assert result.seconds < sum(result.stages.values())


def test_finished_samples_stream_to_other_devices():
    workload = ppo()
    stock, streamed = (run(workload, name, plan=apart(workload)) for name in ("stock", "interstage"))
    assert streamed.stages["values"] < stock.stages["values"]
    assert streamed.generation_and_inference < stock.generation_and_inference


def test_seeds_differ_and_repeat():
    assert run(ppo(), "stock", seed=1).seconds != run(ppo(), "stock", seed=2).seconds
    assert (
        run(ppo(), "interstage+pipeline+scaling", seed=1).seconds
        == run(ppo(), "interstage+pipeline+scaling", seed=1).seconds
    )


def test_an_unknown_strategy_is_refused():
    with pytest.raises(
        FuseError,
        match=r"strategy='fast'; allowed: stock, observe, streaming, interstage, pipeline, realloc, scaling, "
        r"speculation, zero_gradient, old_log_prob, values, share_prompts, response_logits, copies, stream, "
        r"placement, or several",
    ):
        run(ppo(), "fast")


def test_options_out_of_range_are_refused():
    for options, told in (
        ({"rollout_memory": 1.5}, "rollout_memory=1.5: needs >= 0.01 and <= 1.0"),
        ({"migration": "fax"}, "migration='fax': needs one of 'auto', 'prefill', 'transfer'"),
        ({"stock_poll": math.inf}, "stock_poll=inf: needs >= 0.0 and a finite number"),
        ({"stock_poll": math.nan}, "stock_poll=nan: needs >= 0.0 and a finite number"),
    ):
        with pytest.raises(FuseError, match=f"^options.{told}$"):
            read_block(SimulationOptions, options, "options")
    overrides = {f"{ROLLOUT}.gpu_memory_utilization": 5.0}
    planned = Plan((CallPlan("actor_generate", Mesh(0, 1), Layout()),), overrides=overrides)
    with pytest.raises(FuseError, match=r"^options.rollout_memory=5.0: needs >= 0.01 and <= 1.0$"):
        of_plan(SimulationOptions(), planned)


def test_a_rollout_without_room_for_one_sequence_is_refused():
    plan = stock_plan(ppo(), h100(), NO_POLL)
    with pytest.raises(
        FuseError, match=r"llama-7b as dp1 on H100: weights and buffers take .* one sequence has up to 2348"
    ):
        run(ppo(), "stock", replace(NO_POLL, rollout_memory=0.2), plan=_with_rollout(plan, Layout(dp=16)))


def _with_rollout(plan: Plan, layout: Layout) -> Plan:
    return replace(plan, calls=(CallPlan("actor_generate", Mesh(0, 16), layout), *plan.calls[1:]))
