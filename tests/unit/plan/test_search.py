from itertools import combinations

import numpy as np
import pytest
from spaces import best_by_brute_force, choices, filled, random_choice, random_move, random_space

from verl_fuse.plan import branch
from verl_fuse.plan.bound import relax
from verl_fuse.plan.descent import OVERFULL, cost
from verl_fuse.plan.dominance import undominated
from verl_fuse.plan.metropolis import metropolis
from verl_fuse.plan.neighbourhood import improve
from verl_fuse.plan.search import search

SEEDS = range(40)
TIGHT = (10.0, 1.0, 0.6, 0.4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_brute_force_finds_and_proves_it(seed: int):
    space = random_space(seed, options=4, tight=TIGHT[seed % 4])
    best = best_by_brute_force(filled(space))
    found = search(space, random_move, 600.0)
    if best >= OVERFULL:
        assert not found.feasible
    else:
        assert found.seconds == pytest.approx(best)
        assert found.bound <= best * (1 + 1e-9)
        assert found.gap <= 2e-6
        found.space.fill(random_move, found.choice)
        assert cost(found.space.tables, np.array(found.choice)) == found.seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_plan_needs_no_dominated_option(seed: int):
    space = random_space(seed, options=4, tight=TIGHT[seed % 4])
    kept = space.keep(undominated(space.tables))
    assert best_by_brute_force(filled(kept)) == pytest.approx(best_by_brute_force(filled(space)))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_three_calls_chosen_anew_improve_an_improved_plan(seed: int):
    space = filled(random_space(seed, options=4, tight=10.0))
    t, every, begin = space.tables, branch.every_option(space.tables), random_choice(space, np.random.default_rng(seed))
    before = float(cost(t, begin))
    plan, seconds = improve(space, random_move, relax(t), every, begin, before, np.inf)
    assert (seconds <= before, cost(t, plan)) == (True, seconds)
    for free in combinations(range(plan.size), 3):
        others = [c for c in range(plan.size) if c not in free]
        assert min(cost(t, trial) for trial in choices(space, plan, others)) >= seconds * (1 - 2e-6)
    # Out of time at once.
    assert improve(space, random_move, relax(t), every, begin, before, 0.0)[1] == before


def test_an_interrupted_search_still_bounds_what_it_has_not_seen():
    space = random_space(1, options=8, tight=10.0)
    best = best_by_brute_force(filled(space))
    found = search(space, random_move, 1e-6)
    assert found.bound <= best <= found.seconds


def test_ctrl_c_returns_the_best_plan_so_far():
    space = random_space(1, options=5, tight=10.0)
    best = best_by_brute_force(filled(space))
    asked = 0

    def move_until(last: float):
        def move(*arguments):
            nonlocal asked
            asked += 1
            if asked == last:
                raise KeyboardInterrupt
            return random_move(*arguments)

        return move

    search(space, move_until(np.inf), 600.0)
    whole, stopped = asked, []
    for last in range(1, whole + 1):
        asked = 0
        try:
            found = search(space, move_until(last), 600.0)
        except KeyboardInterrupt:
            # No plan yet.
            assert not stopped
            continue
        stopped.append(found.stopped)
        assert found.bound <= best <= found.seconds
        found.space.fill(random_move, found.choice)
        assert cost(found.space.tables, np.array(found.choice)) == found.seconds
    assert len(stopped) > 3
    assert all(stopped)


def test_metropolis_walks_to_the_best_plan_of_a_small_space():
    space = random_space(4, options=4, tight=10.0).with_room_for_moves()
    begin = random_choice(space, np.random.default_rng(0))
    choice, seconds, proposals = metropolis(space, random_move, branch.every_option(space.tables), begin, 2.0)
    assert seconds == pytest.approx(best_by_brute_force(filled(space)))
    assert cost(space.tables, choice) == seconds
    assert proposals > 1000
