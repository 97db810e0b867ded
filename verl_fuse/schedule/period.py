"""Finds the steady state: the turn that a long schedule repeats, and the shorter problem that is left when turns are
taken out.

Invariants (tests/unit/schedule/test_period.py): the bound of the problem is the bound of the shorter one plus the turns
taken out; the shorter problem differs from the problem in its micro-batches alone.
"""

from dataclasses import dataclass, replace

from verl_fuse.schedule.bounds import makespan_bound
from verl_fuse.schedule.solution import MAKESPAN_TOLERANCE
from verl_fuse.schedule.table import OpTable
from verl_fuse.spec.problem import ScheduleProblem

MICROBATCH_MARGIN = 1.25
"""Micro-batches of the shorter problem against the fewest that leave its bound in step: with the fewest,
ramp-up and ramp-down overlap."""

MOST_OPS_SHARE = 0.8
"""A shorter problem has at most this share of the ops."""


@dataclass(frozen=True)
class Period:
    """One turn runs `microbatches[i]` forwards and backwards of pipeline i on each of its stages and takes `length`
    (problem units); `table` repeats it `turns` times more than `short` does."""

    table: OpTable
    short: OpTable
    microbatches: tuple[int, ...]
    turns: int
    length: float


def period_of(table: OpTable) -> Period | None:
    """Return the period of a problem with micro-batches to spare, or None."""
    fewest = min(p.microbatches for p in table.problem.pipelines)
    each = tuple(max(1, round(p.microbatches / fewest)) for p in table.problem.pipelines)
    length = max(
        sum(
            each[i] * (p.forward[p.ranks.index(rank)] + p.backward[p.ranks.index(rank)])
            for i, p in enumerate(table.problem.pipelines)
            if rank in p.ranks
        )
        for rank in range(table.problem.ranks)
    )
    bound = makespan_bound(table)
    most = min((p.microbatches - 1) // n for p, n in zip(table.problem.pipelines, each, strict=True))

    def without(turns: int) -> Period | None:
        """Return the period with these turns taken out, if the bound falls with them."""
        short = OpTable(_shorter(table.problem, each, turns))
        in_step = abs(makespan_bound(short) + turns * length - bound) <= MAKESPAN_TOLERANCE * bound
        return Period(table, short, each, turns, length) if in_step else None

    # A pipeline takes as many micro-batches as stages to warm up.
    warm_up = max(-(-p.stages // n) for p, n in zip(table.problem.pipelines, each, strict=True))
    kept = max(fewest - most, warm_up)
    fails = kept - 1
    # Small tries are cheap: double the kept part until the bound is in step, then halve the gap.
    while kept < fewest and without(fewest - kept) is None:
        fails, kept = kept, 2 * kept
    fits = min(kept, fewest)
    while fits - fails > 1:
        middle = (fits + fails) // 2
        fits, fails = (fits, middle) if without(fewest - middle) is None else (middle, fails)
    turns = fewest - round(fits * MICROBATCH_MARGIN)
    found = without(turns) if turns > 0 else None
    return found if found is not None and len(found.short) <= MOST_OPS_SHARE * len(table) else None


def _shorter(problem: ScheduleProblem, each: tuple[int, ...], turns: int) -> ScheduleProblem:
    pairs = zip(problem.pipelines, each, strict=True)
    return replace(problem, pipelines=tuple(replace(p, microbatches=p.microbatches - n * turns) for p, n in pairs))
