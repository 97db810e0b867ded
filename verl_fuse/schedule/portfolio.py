"""Runs the portfolio: every way to search pursues the same goals, from the same incumbent, until value and bound meet.

A long problem is solved with turns of its steady state taken out, then stretched. CP-SAT on the whole problem settles
small problems. CP-SAT with limits on micro-batches in flight reaches the bound of large problems and annealing drains
the memory that the bound takes. Within little memory, annealing of the makespan comes near the bound and window search
closes the gap.

Without OR-tools, which the extra `solver` installs, only the two annealings run: nothing is proven beyond the bounds in
closed form, and a long problem is searched as a whole.
"""

import math
import time
from dataclasses import replace
from functools import partial

from verl_fuse.schedule.descent import Attempt, descend
from verl_fuse.schedule.makespan_annealing import MakespanAnnealing
from verl_fuse.schedule.memory_annealing import MemoryAnnealing
from verl_fuse.schedule.methods import has_solver
from verl_fuse.schedule.period import Period, period_of
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable

SMALL = 800
"""Up to this many ops the whole problem is not too much for the constraint solver, which then has the first turn: it
often ends the round alone."""


SHORT_SHARE = 0.7
"""Part of the time for the shorter problem of a long one."""

STRETCH_SHARE = 0.1
"""The same for stretching its solution, within its memory and then within the limit."""


def portfolio(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """Solve the shorter problem first where there is one, stretch its solution, then solve the problem itself."""
    period = period_of(table) if has_solver() else None
    if period is None:
        return descend(table, budget, attempts(table, budget.workers))
    return descend(table, budget, attempts(table, budget.workers), partial(_stretched, period, budget))


def attempts(table: OpTable, workers: int) -> list[Attempt]:
    """Return all attempts, in an order that depends on size, on as many threads as there are workers."""
    threads = range(max(2, workers))
    annealing = [MemoryAnnealing(table, 0), *(MakespanAnnealing(table, worker) for worker in threads)]
    if not has_solver():
        return annealing
    from verl_fuse.schedule.exact import ExactSearch
    from verl_fuse.schedule.in_flight import InFlightSearch
    from verl_fuse.schedule.windows import WindowSearch

    whole: list[Attempt] = [ExactSearch(table)] if len(table) <= SMALL else []
    polishing = [WindowSearch(table, worker) for worker in threads]
    return [*whole, InFlightSearch(table, 0), *annealing, *polishing]


def _stretched(period: Period, budget: Budget) -> Solution | None:
    """Return the whole problem's solution from the shorter problem's; with more memory, up to the limit, where the turn
    does not fit into the shorter solution's memory."""
    from verl_fuse.schedule.stretch import stretch

    report = budget.report
    part = replace(
        budget.part(SHORT_SHARE * budget.left), report=lambda text: report(f"without {period.turns} turns: {text}")
    )
    solution, _ = descend(period.short, part, attempts(period.short, budget.workers))
    limit = period.table.problem.memory_limit
    for capacity in (solution.peak, math.inf if limit is None else limit):
        deadline = min(time.monotonic() + STRETCH_SHARE * budget.seconds, budget.deadline)
        found = stretch(period, solution, capacity, budget.seed, deadline)
        if found is not None:
            return found
    return None
