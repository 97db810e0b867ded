import numpy as np
import pytest
from spaces import PPO, filled, random_choice, random_space

from verl_fuse.plan.bound import lower_bound, relax
from verl_fuse.plan.descent import optimistic_cost


@pytest.mark.parametrize("seed", range(40))
def test_no_completion_is_faster_than_the_bound(seed: int):
    space = filled(random_space(seed, options=3, tight=10))
    t, relaxation, rng = space.tables, relax(space.tables), np.random.default_rng(seed)
    for _ in range(40):
        choice = random_choice(space, rng)
        seconds = optimistic_cost(t, choice)
        for fixed in range(len(choice) + 1):
            partial = choice.copy()
            partial[rng.permutation(len(choice))[fixed:]] = -1
            assert lower_bound(t, relaxation, partial) <= seconds + 1e-9


def test_the_blocks_of_ppo_are_generation_inference_and_training():
    assert relax(random_space(1, calls=PPO).tables).block.tolist() == [0, 1, 1, 1, 2, 2]
