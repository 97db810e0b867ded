"""Plans whose critic may be trained while the next step generates: random spaces with the graph of PPO, as in the
other tests of the search."""

from dataclasses import replace

import numpy as np
import pytest
from spaces import CLUSTER, PPO, best_by_brute_force, filled, random_choice, random_move, random_space

from verl_fuse.plan.bound import lower_bound, relax
from verl_fuse.plan.descent import OVERFULL, cost, optimistic_cost
from verl_fuse.plan.evaluate import EVALUATED_STEPS, schedule
from verl_fuse.plan.search import search
from verl_fuse.plan.space import CallConfig, PlanSpace
from verl_fuse.spec.cluster import Mesh
from verl_fuse.spec.layout import Layout

SEEDS = range(40)
TIGHT = (10.0, 1.0, 0.6, 0.4)
GENERATE, VALUES, CRITIC, ACTOR = 0, 3, 4, 5


def deferring(space: PlanSpace, call: int = CRITIC) -> PlanSpace:
    """Return the same options, with this call as the call that the next step does not wait for."""
    return replace(space, tables=space.tables._replace(deferred=call))


def run(space: PlanSpace, choice, steps: int = EVALUATED_STEPS) -> tuple[float, np.ndarray, np.ndarray]:
    starts, ends = np.empty(2 * len(choice)), np.empty(2 * len(choice))
    return schedule(space.tables, np.array(choice, np.int64), steps, starts, ends), starts, ends


LEFT, RIGHT, ALL = Mesh(0, 4), Mesh(4, 4), Mesh(0, 8)


def placed(critic: float, values: Mesh = RIGHT, sync: float = 0.0) -> PlanSpace:
    """Place generation (10 s) and inference (1 s) on the first half, the critic on the second, and values (1 s) there,
    the actor (2 s) on all devices; its weights take `sync` to generation, other moves are free."""
    seconds = (10.0, 1.0, 1.0, 1.0, critic, 2.0)
    meshes = (LEFT, LEFT, LEFT, values, RIGHT, ALL)
    configs = [
        [CallConfig(Layout(dp=mesh.size), 1, False, takes, 0, 0)]
        for mesh, takes in zip(meshes, seconds, strict=True)
    ]  # fmt: skip
    space = PlanSpace.build(PPO, CLUSTER, configs, (LEFT, RIGHT, ALL), 6.0, defers=True)
    begin = space.tables.begin
    mine = [
        next(o for o in range(begin[c], begin[c + 1]) if space.meshes[space.mesh[o]] == meshes[c]) for c in range(6)
    ]
    space = space.keep(np.isin(np.arange(space.config.size), mine)).with_room_for_moves()
    space.fill(lambda role, train, user: sync if role == "actor" else 0.0, np.arange(6))
    return space


def test_the_critic_hides_behind_generation_and_the_actor_goes_first():
    space = placed(critic=6.0)
    seconds, starts, ends = run(space, range(6))
    # 10 of generation, reward and reference one after the other, 2 of the actor.
    assert seconds == 14.0
    assert starts[ACTOR] == ends[1:4].max()
    assert starts[CRITIC] == ends[ACTOR]
    assert run(deferring(space, -1), range(6))[0] == 20.0


def test_the_critic_gives_way_to_the_weights_that_generation_waits_for():
    # 14 s of generation, inference and the actor, and the weights, however long the critic takes.
    assert run(placed(critic=6.0, sync=1.5), range(6))[0] == 15.5
    assert run(placed(critic=11.0, sync=1.5), range(6))[0] == 15.5


def test_a_critic_that_takes_longer_than_generation_is_waited_for():
    # Values of 1, the rest of inference beside them, 2 of the actor, 20 of the critic.
    assert run(placed(critic=20.0), range(6))[0] == 23.0
    # Elsewhere as well, though weights move there in no time.
    _, starts, ends = run(placed(critic=20.0, values=LEFT), range(6))
    before = run(placed(critic=20.0, values=LEFT), range(6), EVALUATED_STEPS - 1)[2]
    assert starts[VALUES] == before[CRITIC] > ends[GENERATE]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_repeat_and_keep_the_invariants(seed: int):
    space = deferring(filled(random_space(seed, options=3, calls=PPO)))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choice = random_choice(space, rng)
        seconds, starts, _ = run(space, choice)
        assert seconds == pytest.approx(run(space, choice, 12)[0])
        before = run(space, choice, EVALUATED_STEPS - 1)[2]
        assert before[CRITIC] <= starts[VALUES] + 1e-9
        assert before[ACTOR] <= starts[GENERATE] + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_no_completion_is_faster_than_the_bound(seed: int):
    space = deferring(filled(random_space(seed, options=3, calls=PPO, tight=10)))
    t, relaxation, rng = space.tables, relax(space.tables), np.random.default_rng(seed)
    for _ in range(40):
        choice = random_choice(space, rng)
        seconds = optimistic_cost(t, choice)
        for fixed in range(len(choice) + 1):
            partial = choice.copy()
            partial[rng.permutation(len(choice))[fixed:]] = -1
            assert lower_bound(t, relaxation, partial) <= seconds + 1e-9


def test_the_deferred_call_is_in_no_block():
    assert relax(deferring(random_space(1, calls=PPO)).tables).block.tolist() == [0, 1, 1, 1, -1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_brute_force_finds_and_no_slower_plan_than_without(seed: int):
    serial = random_space(seed, options=3, calls=PPO, tight=TIGHT[seed % 4])
    space = deferring(serial)
    best = best_by_brute_force(filled(space))
    found = search(space, random_move, 600.0)
    if best >= OVERFULL:
        assert not found.feasible
        return
    assert found.seconds == pytest.approx(best)
    assert found.bound <= best * (1 + 1e-9)
    assert found.gap <= 2e-6
    assert cost(found.space.tables, np.array(found.choice)) == found.seconds
    assert best <= best_by_brute_force(filled(serial)) * (1 + 1e-9)
