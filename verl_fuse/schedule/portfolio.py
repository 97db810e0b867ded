"""The portfolio: constraint solving, annealing and window search pursue the same goals, from the same incumbent, and stop when value and bound meet.

The constraint solver is quick where a goal is tight or impossible, annealing finds large schedules near the goal, window search closes what is left.
"""

from verl_fuse.schedule.annealed import Anneal
from verl_fuse.schedule.descent import Attempt, descend
from verl_fuse.schedule.exact import Exact
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.windows import Windows

SMALL = 600
"""Up to this many ops the constraint solver has the first turn: it often ends the round alone."""


def portfolio(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """All attempts, in an order that depends on size, on as many threads as the budget has workers."""
    searches: list[Attempt] = [Windows(table, 0), Anneal(table, 0)]
    attempts = [Exact(table), *searches] if len(table) <= SMALL else [*searches, Exact(table)]
    attempts += [Anneal(table, worker) for worker in range(1, budget.workers - 1)]
    return descend(table, budget, attempts)
