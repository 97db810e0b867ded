import numpy as np
import pytest
from spaces import GRPO, filled, random_choice, random_move, random_space

from verl_fuse.plan.evaluate import move_seconds


@pytest.mark.parametrize("seed", range(10))
def test_rows_mean_what_they_say(seed: int):
    space = random_space(seed)
    t = space.tables
    for c in range(len(space.calls)):
        for o in range(t.begin[c], t.begin[c + 1]):
            config, mesh = space.configs[space.config[o]], space.meshes[space.mesh[o]]
            assert (t.first[o], t.end[o], t.seconds[o]) == (mesh.first, mesh.end, config.seconds)
            assert mesh.size == config.layout.devices
            for p in range(t.begin[c], t.begin[c + 1]):
                other = (space.meshes[space.mesh[p]], space.configs[space.config[p]].layout)
                assert (t.placement[o] == t.placement[p]) == ((mesh, config.layout) == other)


@pytest.mark.parametrize("seed", range(10))
def test_moves_are_the_cost_models(seed: int):
    space = filled(random_space(seed, options=3))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choice = random_choice(space, rng)
        for user, train in enumerate(space.tables.source):
            if train >= 0:
                source, target = (
                    (space.meshes[space.mesh[o]], space.configs[space.config[o]]) for o in (choice[train], choice[user])
                )
                same = (source[0], source[1].layout) == (target[0], target[1].layout)
                expected = 0.0 if same else random_move(space.calls[user].role, source, target)
                assert move_seconds(space.tables, choice[train], choice[user]) == expected


def test_a_plan_names_calls_meshes_and_layouts():
    space = random_space(0, calls=GRPO)
    plans = space.plan(space.tables.begin[:-1])
    assert [plan.call for plan in plans] == ["generate", "reference_infer", "actor_infer", "actor_train"]
    assert all(plan.mesh.size == plan.layout.devices for plan in plans)
