"""Finds the fastest plan of a space, and bounds its distance from the best plan.

A beam over partial plans and a descent give a good plan at once. Its time rules out every option whose bound alone is
not below it. Three calls at a time are then chosen anew, and a proof begins; if that takes long, Metropolis walks look
for a better plan, and the proof goes on after them.

Invariants (tests/unit/plan/test_search.py):
- the plan fits if any plan found does, and its time is the exact one;
- Ctrl-C, once there is a plan, ends the search with the best one so far;
- no plan of the space takes less than `bound`.
"""

import functools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_fuse.plan import branch
from verl_fuse.plan.beam import build
from verl_fuse.plan.bound import relax
from verl_fuse.plan.descent import OVERFULL, exact_cost
from verl_fuse.plan.dominance import undominated
from verl_fuse.plan.meshes import legal_meshes
from verl_fuse.plan.metropolis import metropolis
from verl_fuse.plan.proof_search import ProofSearch, descend
from verl_fuse.plan.space import CallConfig, MoveSeconds, PlanSpace
from verl_fuse.plan.tables import PlanTables
from verl_fuse.spec.cluster import Cluster, Device
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.workload import Call

BEAM_WIDTH = 64
BEAM_OPTIONS = 400
# Plans of the beam that are improved.
STARTS = 4
# Entries of the table of moves, 8 bytes each; beyond, options with larger bounds are left out (and bound the answer).
MOST_MOVE_ENTRIES = 30_000_000
# Neighbourhoods and the proof get this share of the time; if it has not ended then, walks get their share, and the
# proof the rest.
EARLY, WALK = 0.35, 0.35


@dataclass(frozen=True)
class SearchResult:
    """A plan as option of each call, its seconds per step, and the seconds that no plan of the space can beat. `space`
    is the rest of the space after dropping options that cannot be part of a better plan; `options` is how many there
    were."""

    space: PlanSpace
    choice: tuple[int, ...]
    seconds: float
    bound: float
    options: int
    nodes: int
    elapsed: float
    stopped: bool = False
    """Whether Ctrl-C ended the search."""

    @property
    def feasible(self) -> bool:
        return self.seconds < OVERFULL

    @property
    def gap(self) -> float:
        """Return the share of the step that a better plan could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds)


def search(whole: PlanSpace, move: MoveSeconds, time_limit: float) -> SearchResult:
    """Return the best plan found within `time_limit` seconds, compilation not counted; not `feasible` if the search
    found no plan that fits into memory."""
    compile_kernels()
    return _search(whole, move, time_limit)


def _search(whole: PlanSpace, move: MoveSeconds, time_limit: float) -> SearchResult:
    begun = time.monotonic()
    space = whole.keep(undominated(whole.tables))
    alone = branch.bounds_alone(space.tables, relax(space.tables))
    plans = sorted((exact_cost(space, move, plan), tuple(plan)) for plan in _plans(space.tables, alone))[:STARTS]
    cost = plans[0][0]
    ceiling = _affordable(space, alone, cost)
    kept = (alone <= ceiling) | np.isin(np.arange(alone.size), [plan for _, plan in plans])
    space = space.keep(kept).with_room_for_moves()
    starts = [(np.cumsum(kept)[np.array(plan)] - 1, cost) for cost, plan in plans]
    hunt = ProofSearch(space, move, *starts[0])
    stopped = False
    try:
        hunt.best, hunt.seconds = min((descend(space, move, *start) for start in starts), key=lambda end: end[1])
        _hunt(hunt, begun, time_limit)
    except KeyboardInterrupt:
        stopped = True
        # The interrupt may have come between a better plan and its time.
        hunt.seconds = exact_cost(space, move, hunt.best)
    bound = hunt.bound if ceiling >= hunt.seconds else min(hunt.bound, ceiling)
    return SearchResult(
        space=space,
        choice=tuple(int(option) for option in hunt.best),
        seconds=hunt.seconds,
        bound=min(bound, hunt.seconds),
        options=whole.tables.seconds.size,
        nodes=hunt.nodes,
        elapsed=time.monotonic() - begun,
        stopped=stopped,
    )


def _hunt(hunt: ProofSearch, begun: float, time_limit: float) -> None:
    if hunt.seconds >= OVERFULL:
        hunt.fit(begun + EARLY * time_limit)
    if hunt.seconds < OVERFULL:
        hunt.improve(begun + EARLY * time_limit)
        hunt.prove(begun + EARLY * time_limit)
        if not hunt.proven:
            hunt.walk(begun + (EARLY + WALK) * time_limit)
            hunt.prove(begun + time_limit)


@functools.cache
def compile_kernels() -> None:
    """Run everything once on a space of a few plans: kernels are compiled, or read from numba's cache, before a clock
    starts."""
    calls = (
        Call("generate", "actor", "generate"),
        Call("score", "reward", "infer", ("generate",)),
        Call("train", "actor", "train", ("score",)),
    )
    cluster, config = (
        Cluster(1, 2, Device("toy", 1.0, 1.0, 1.0), 1.0, 1.0, 1.0),
        CallConfig(Layout(), 1, False, 1.0, 0.1, 0.1),
    )
    toy = PlanSpace.build(calls, cluster, [[config]] * len(calls), legal_meshes(cluster), 1.0)

    def move(*_: object) -> float:
        return 1.0

    found = _search(toy, move, np.inf)
    hunt = ProofSearch(found.space, move, np.array(found.choice, np.int64), found.seconds)
    hunt.candidates(np.inf, np.inf)
    metropolis(found.space, move, branch.every_option(found.space.tables), hunt.best, 1e-3)


def _plans(t: PlanTables, alone: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Return plans to begin with: the ends of a beam, and the plan in which every call needs the least memory while it
    runs, and then beside other calls."""
    relaxation = relax(t)
    calls = range(t.begin.size - 1)
    order = branch.start(relaxation, np.zeros(len(calls), np.int64), np.inf).order
    plans = build(t, relaxation, branch.candidates(t, alone, np.inf, BEAM_OPTIONS), order, BEAM_WIDTH)
    leanest = np.lexsort((t.resident, t.resident + t.active + t.copy))
    lean = [next(o for o in leanest if t.begin[c] <= o < t.begin[c + 1]) for c in calls]
    return [*plans, np.array(lean, np.int64)]


def _affordable(space: PlanSpace, alone: NDArray[np.float64], cost: float) -> float:
    """Return the largest bound up to `cost` below which the options leave room for their moves."""
    t = space.tables
    least = max(float(alone[t.begin[c] : t.begin[c + 1]].min()) for c in range(len(space.calls)))
    if not np.isfinite(least):
        return cost
    finite = min(cost, float(np.max(alone, initial=0.0, where=np.isfinite(alone))))
    for share in np.linspace(1.0, 0.0, 21):
        ceiling = least + share * (finite - least)
        if space.keep(alone <= ceiling).room <= MOST_MOVE_ENTRIES:
            return cost if share == 1.0 else ceiling
    return least
