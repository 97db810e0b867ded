"""Fused training through the schedule solvers."""

from dataclasses import replace

import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.simulate.calls import train_seconds
from verl_fuse.simulate.pipeline import activation_room, fused_problem, fused_training, unfusable
from verl_fuse.simulate.replicas import mean_batch
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan

BIG = ppo(actor="llama-65b", critic="llama-65b", reference="llama-65b", minibatches=8)


def train(call: str, layout: str, microbatches: int = 8) -> CallPlan:
    parsed = Layout.parse(layout)
    return CallPlan(call, Mesh(0, parsed.devices), parsed, microbatches)


def test_fused_training_fills_bubbles():
    cost = h100(16)
    plan = stock_plan(BIG, cost, NO_POLL)
    fused = fused_training(BIG, plan, cost, NO_POLL)
    assert fused.reason == ""
    assert 0.5 < fused.ratio < 1
    trains = [call for call in BIG.calls if call.kind == "train"]
    batch = mean_batch(BIG)
    assert fused.seconds < sum(train_seconds(BIG, c, plan.call(c.name), cost, batch, NO_POLL) for c in trains)
    assert not unfusable(fused.plan.call("actor_train"), fused.plan.call("critic_train"))


def test_little_room_makes_nothing_faster_than_the_work_that_is_there():
    """Where few activations fit, a schedule is compared with one model after the other, which fits, not with one that
    waits for room as well."""
    tight = ppo(actor="qwen2.5-32b", critic="qwen2.5-32b", prompts=2048, samples=4,
                response="lognormal:median=3500,sigma=0.9,max=20480",
                minibatches=4)  # fmt: skip
    cost = h100(32)
    fused = fused_training(tight, stock_plan(tight, cost, NO_POLL), cost, NO_POLL)
    trained = tight.actor.parameters + tight.model("critic").parameters
    flops = 6 * trained * tight.sequences * (tight.prompt.mean + tight.response.mean)
    assert fused.seconds > flops / (cost.cluster.devices * cost.cluster.device.flops)


def test_a_smaller_pipeline_runs_in_copies_against_the_deeper_one():
    actor, critic = train("actor_train", "tp8 pp4 dp1"), train("critic_train", "tp8 pp2 dp2", 4)
    problem = fused_problem(BIG, actor, critic, h100(4), NO_POLL)
    assert [(p.model, p.ranks, p.microbatches) for p in problem.pipelines] == [
        ("actor", (0, 1, 2, 3), 8),
        ("critic", (1, 0), 4),
        ("critic", (3, 2), 4),
    ]


@pytest.mark.parametrize(
    ("actor", "critic", "reason"),
    [
        ("tp8 pp2", "tp4 pp4", "differ in tp"),
        ("tp2 pp4", "tp2 pp2 cp2", "differ in tp or cp"),
        ("tp8 dp2", "tp8 dp2", "no pipeline parallelism"),
        ("tp1 pp4 dp3", "tp1 pp6 dp2", "one must divide the other"),
        ("tp8 pp4", "tp8 pp2 dp2", ""),
    ],
)
def test_why_layouts_cannot_be_fused(actor: str, critic: str, reason: str):
    found = unfusable(train("actor_train", actor), train("critic_train", critic))
    assert reason in found
    assert bool(reason) == bool(found)


def test_activations_share_the_memory_with_both_models():
    actor, critic = train("actor_train", "tp8 pp4 dp1"), train("critic_train", "tp8 pp2 dp2", 4)
    assert activation_room(BIG, actor, critic, h100(4), NO_POLL) < 0
    assert 0 < activation_room(ppo(minibatches=8), actor, critic, h100(4), NO_POLL) < 79.6 * 2**30
    fused = fused_training(BIG, stock_plan(BIG, h100(16), NO_POLL), h100(16), NO_POLL)
    assert fused.problem is not None
    assert fused.problem.memory_limit is not None


def test_the_room_lacks_what_the_fullest_stage_needs_beside_the_activations_it_holds():
    """Twenty-four blocks on five stages: the last stage has four of them, and the actor's head."""
    small = ppo(actor="qwen2.5-0.5b", critic="qwen2.5-0.5b", reference="qwen2.5-0.5b", reward=None)
    actor, critic = train("actor_train", "tp1 pp5 dp1", 2), train("critic_train", "tp1 pp5 dp1", 32)
    cost, part = h100(), mean_batch(small).split(4 * 2)
    memory = cost.memory(small.actor, "train", actor.layout, microbatch=part, recompute=True)
    of_critic = cost.memory(small.model("critic"), "train", critic.layout, recompute=True)
    held = 4 * part.tokens * 2 * small.actor.hidden
    room = cost.cluster.device.memory - memory.static - of_critic.static - (memory.active - held)
    # The other way round, so that the model that needs more comes last.
    assert activation_room(small, actor, critic, cost, NO_POLL) == pytest.approx(room, rel=1e-12)
    assert activation_room(small, critic, actor, cost, NO_POLL) == pytest.approx(room, rel=1e-12)


def test_without_a_critic_there_is_nothing_to_fuse():
    cost, workload = h100(), grpo()
    fused = fused_training(workload, stock_plan(workload, cost, NO_POLL), cost, NO_POLL)
    assert (fused.ratio, fused.reason) == (1.0, "grpo trains no critic")


def test_apart_is_not_fused():
    cost = h100()
    plan = stock_plan(ppo(), cost, NO_POLL)
    calls = tuple(
        replace(call, mesh=Mesh(8, 8), layout=Layout(dp=8)) if call.call == "critic_train" else call
        for call in plan.calls
    )
    fused = fused_training(ppo(), replace(plan, calls=calls), cost, NO_POLL)
    assert fused.plan.calls == calls
    assert "do not both train on all devices" in fused.reason
