"""Searches plans by the Metropolis method of ReaL (arXiv 2406.14088, section 5), the fallback and the yardstick of our
search.

The temperature falls geometrically from 10 % to 0.001 % of the first plan's time over the time given. The published
code compares costs in units in which nearly every move is accepted; relative temperatures do not depend on the unit.
"""

import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl_fuse.plan.branch import Candidates
from verl_fuse.plan.descent import OVERFULL, cost, optimistic_cost
from verl_fuse.plan.evaluate import unfilled
from verl_fuse.plan.space import MoveSeconds, PlanSpace
from verl_fuse.plan.tables import PlanTables

FIRST_TEMPERATURE, LAST_TEMPERATURE = 1e-1, 1e-5
PROPOSALS_PER_LOOK = 20_000


def metropolis(
    space: PlanSpace,
    move: MoveSeconds,
    candidates: Candidates,
    begin: NDArray[np.int64],
    time_limit: float,
    hot: float = FIRST_TEMPERATURE,
    seed: int = 0,
) -> tuple[NDArray[np.int64], float, int]:
    """Return the best plan of these options found, its cost (see descent.cost) and the number of proposals; `hot` is
    the first temperature over the first cost."""
    t = space.tables
    choice, best = begin.copy(), begin.copy()
    space.fill(move, begin)
    current = least = float(cost(t, begin))
    proposals = 0
    _seed(seed)
    # A walk of no steps: the clock starts once everything is compiled.
    _walk(t, candidates, choice, best, current, least, 1.0, 0)
    started = time.monotonic()
    # The loop does not run if there is no time.
    while 0 <= (spent := (time.monotonic() - started) / time_limit) < 1:
        temperature = (least if least < OVERFULL else OVERFULL) * hot * (LAST_TEMPERATURE / hot) ** spent
        current, least, used, call, kept, ceiling = _walk(
            t, candidates, choice, best, current, least, temperature, PROPOSALS_PER_LOOK
        )
        proposals += used
        if call >= 0:
            # Accepted if its move were free; now with the move.
            space.fill(move, choice)
            found = float(cost(t, choice))
            if found > ceiling:
                choice[call] = kept
                continue
            current = found
            if found < least:
                least = found
                best[:] = choice
    return best, float(least), proposals


@njit(cache=True)
def _seed(seed: int) -> None:
    np.random.seed(seed)


@njit(cache=True)
def _walk(
    t: PlanTables,
    k: Candidates,
    choice: NDArray[np.int64],
    best: NDArray[np.int64],
    current: float,
    least: float,
    temperature: float,
    most: int,
) -> tuple[float, float, int, int, int, float]:
    """Make up to `most` proposals, each a random option of a random call. Stop at a proposal that needs a move that is
    not filled in.

    Returns costs of `choice` and `best`, proposals made, and for the one it stopped at the call, its option before and
    the cost up to which it is accepted; call -1 if there is none.
    """
    for i in range(most):
        c = np.random.randint(choice.size)
        kept = choice[c]
        choice[c] = k.options[c, np.random.randint(k.counts[c])]
        ceiling = current - temperature * np.log(1.0 - np.random.random())
        found = optimistic_cost(t, choice)
        if found > ceiling:
            choice[c] = kept
            continue
        if unfilled(t, choice) >= 0:
            return current, least, i + 1, c, kept, ceiling
        current = found
        if found < least:
            least = found
            best[:] = choice
    return current, least, most, -1, -1, 0.0
