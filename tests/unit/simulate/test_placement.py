"""A critic on devices of its own in simulated steps."""

from dataclasses import replace

import numpy as np
import pytest
from setups import NO_POLL, grpo, h100, ppo

from verl_fuse.simulate.placement import deferred, is_apart, placements
from verl_fuse.simulate.step import chosen_placement, simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.simulate.tasks import Task, run_tasks
from verl_fuse.spec.cluster import Mesh

ALL, FRONT, BACK = Mesh(0, 4), Mesh(0, 3), Mesh(3, 1)


def tasks(generation: float, values: float, critic: float, actor: float, sync: float) -> list[Task]:
    """A step on four devices, of which the critic has the last."""
    before = ("critic_train", "update_weights")
    return [
        Task("actor_generate", "gen", "generate", (FRONT,), generation, after_previous=before),
        Task("critic_infer", "values", "inference", (BACK,), values, ("actor_generate",)),
        Task("critic_train", "update_critic", "train", (BACK,), critic, ("critic_infer",)),
        Task("actor_train", "update_actor", "train", (ALL,), actor, ("critic_infer",)),
        Task("update_weights", "update_weights", "sync", (ALL, FRONT), sync, ("actor_train",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("critic", "period"),
    # Hidden as a whole; longer than generation by one; in turn each would take 10 + 1 + 2 + 1
    # seconds beside the critic's.
    [(3.0, 14.0), (10.0, 14.0), (11.0, 15.0)],
)
def test_the_critic_hides_behind_the_next_generation(critic: float, period: float):
    step = deferred(tasks(10.0, 1.0, critic, 2.0, 1.0))
    placed = {(p.task.name, p.step): (p.start, p.end) for p in run_tasks([step] * 4, 4)}
    assert placed["update_weights", 3][1] - placed["update_weights", 2][1] == period
    for number in range(1, 4):
        before = placed["critic_train", number - 1]
        assert before[1] <= placed["critic_infer", number][0], "values are the trained critic's"
        assert placed["update_weights", number - 1][1] == before[0], "the actor and its weights go first"
        assert placed["actor_generate", number][0] == placed["update_weights", number - 1][1]


def test_without_deferral_generation_waits_for_the_critic():
    placed = {(p.task.name, p.step): (p.start, p.end) for p in run_tasks([tasks(10.0, 1.0, 3.0, 2.0, 1.0)] * 3, 4)}
    assert placed["update_weights", 2][1] - placed["update_weights", 1][1] == 17.0


def test_a_placement_changes_generation_and_the_critic_alone():
    workload, cost = ppo(), h100()
    plan = stock_plan(workload, cost, NO_POLL)
    found = placements(workload, plan, cost, NO_POLL)
    assert found
    for placed in found:
        assert is_apart(placed)
        critic, generate = placed.call("critic_train"), placed.call("actor_generate")
        assert critic.mesh == placed.call("critic_infer").mesh
        assert (generate.mesh.first, generate.mesh.end, critic.mesh.end) == (0, critic.mesh.first, 16)
        layout = plan.call("actor_generate").layout
        assert replace(generate.layout, dp=layout.dp) == layout
        changed = {call.call for call in placed.calls if call != plan.call(call.call)}
        assert changed == {"actor_generate", "critic_train", "critic_infer"}
    sizes = [placed.call("critic_train").mesh.size for placed in found]
    assert sizes == sorted(set(sizes))
    assert not is_apart(plan)
    grpo_plan = stock_plan(grpo(), cost, NO_POLL)
    assert placements(grpo(), grpo_plan, cost, NO_POLL) == ()
    assert not is_apart(grpo_plan)


def test_it_is_chosen_only_where_it_is_faster_and_says_what_to_set():
    cost = h100()
    for workload in (ppo(), ppo(response="fixed:16"), grpo()):
        plan = stock_plan(workload, cost, NO_POLL)
        ours, observed = (
            simulate_step(workload, plan, cost, name, np.random.default_rng(0), NO_POLL)
            for name in ("placement", "observe")
        )
        chosen = chosen_placement(workload, plan, cost, "placement", NO_POLL)
        if chosen == plan:
            assert ours.seconds == observed.seconds
            assert ours.notes == ("a critic on devices of its own is not predicted to gain",)
        else:
            mesh = chosen.call("critic_train").mesh
            assert ours.seconds < 1.02 * observed.seconds, "on draws it was not chosen on"
            assert f"fuse.placement.critic={{first:{mesh.first},devices:{mesh.size}}}" in ours.notes[0]
    assert is_apart(chosen_placement(ppo(), stock_plan(ppo(), cost, NO_POLL), cost, "placement", NO_POLL))
