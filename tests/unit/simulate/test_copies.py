"""Copies of the actor on the devices of each replica: bytes, seconds, and what they are refused for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.cli.plan import stream_of
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.errors import FuseError
from verl_fuse.simulate.calls import train_seconds
from verl_fuse.simulate.copies import held_bytes, streamed_update, why_not
from verl_fuse.simulate.replicas import mean_batch
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan, Plan

COST = h100()
WORKLOAD = grpo(reference=None, minibatches=1)


def placed(tp: int, workload=WORKLOAD) -> Plan:
    """The stock plan with replicas of `tp` devices."""
    plan = stock_plan(workload, COST, NO_POLL)
    generate = CallPlan("actor_generate", Mesh(0, 16), Layout(tp=tp, dp=16 // tp))
    return replace(plan, calls=(generate, *plan.calls[1:]))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_twenty_bytes_per_parameter_over_the_devices_of_a_replica(devices: int):
    model = WORKLOAD.actor
    assert held_bytes(model, devices, COST) == pytest.approx(20 * model.parameters / devices, rel=1e-3)


def test_a_model_that_does_not_fit_on_a_replica_is_said_with_its_size():
    said = why_not(WORKLOAD, placed(1), COST, NO_POLL)
    assert said is not None
    assert said.startswith("141.8 GiB of parameters, moments and gradients on each device of a replica of 1")
    assert "do not fit into 79.6 GiB" in said
    assert why_not(WORKLOAD, placed(4), COST, NO_POLL) is None
    with pytest.raises(FuseError, match=r"141.8 GiB of parameters"):
        streamed_update(WORKLOAD, placed(1), COST, NO_POLL)


def test_gradients_that_wait_need_room_beside_those_of_a_micro_batch():
    """Of 7.6 billion parameters on two devices: 70.9 GiB are held, 56.7 of them without the gradients that wait."""

    def of(gib: float) -> AnalyticCost:
        device = replace(COST.cluster.device, memory=gib * 2**30)
        return AnalyticCost(replace(COST.cluster, device=device))

    assert str(why_not(WORKLOAD, placed(2), of(70), NO_POLL)).startswith("70.9 GiB of parameters, moments")
    assert why_not(WORKLOAD, placed(2), of(80), NO_POLL) is None


def test_what_cannot_stream_is_said():
    assert "critic" in str(why_not(ppo(minibatches=1), stock_plan(ppo(), COST, NO_POLL), COST, NO_POLL))
    assert "several updates" in str(why_not(grpo(minibatches=2), placed(4), COST, NO_POLL))
    assert "one replica" in str(why_not(WORKLOAD, placed(16), COST, NO_POLL))


def test_plan_says_what_a_stream_would_need():
    def said(tp: int, workload=WORKLOAD, strategy="fsdp"):
        return stream_of(workload, SimpleNamespace(plan=replace(placed(tp), strategy=strategy)), COST)  # type: ignore[arg-type]

    assert said(4) == (
        "fuse.update.stream: 35.5 GiB per device with a copy on each replica; `verl-fuse simulate` prices it"
    )
    assert str(said(1)).startswith("fuse.update.stream: 141.8 GiB")
    assert said(4, replace(WORKLOAD, minibatches=2)) is None
    assert said(4, strategy="megatron") is None


def test_the_update_of_all_copies_together_takes_about_what_stock_takes():
    plan = placed(4)
    update = streamed_update(WORKLOAD, plan, COST, NO_POLL)
    mean = WORKLOAD.prompt.mean + WORKLOAD.response.mean
    whole = update.per_token * mean * WORKLOAD.sequences / 4 + update.end_seconds
    (train,) = [call for call in plan.calls if call.call == "actor_train"]
    call = WORKLOAD.calls[-1]
    stock = train_seconds(WORKLOAD, call, train, COST, mean_batch(WORKLOAD), NO_POLL)
    assert 0.7 * stock < whole < 2 * stock
    # 4 bytes of a quarter of the parameters, to and from the other copies.
    assert update.end_seconds > COST.reduce_copies(WORKLOAD.actor, 4, 4) > 0
    assert COST.reduce_copies(WORKLOAD.actor, 4, 1) == 0
    assert streamed_update(replace(WORKLOAD, zero_gradient=0.5), plan, COST, NO_POLL).per_token == pytest.approx(
        update.per_token / 2
    )


def test_what_does_not_fit_beside_the_rollout_is_loaded_first():
    few = streamed_update(WORKLOAD, placed(4), COST, replace(NO_POLL, rollout_memory=0.5))
    assert few.load_seconds == 0
    assert streamed_update(WORKLOAD, placed(4), COST, replace(NO_POLL, rollout_memory=0.8)).load_seconds > 0
