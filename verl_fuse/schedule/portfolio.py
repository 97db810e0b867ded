"""The portfolio: constraint solving, annealing and window search pursue the same goals, from the same incumbent, and stop when value and bound meet.

The constraint solver is quick where a goal is tight or impossible, annealing finds large schedules near the goal, window search closes what is left.
"""

from verl_fuse.schedule.annealed import Anneal
from verl_fuse.schedule.descent import Attempt, descend
from verl_fuse.schedule.exact import Exact
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.windows import Windows


def portfolio(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """All attempts in this order, on as many threads as the budget has workers."""
    attempts: list[Attempt] = [Anneal(table, 0), Exact(table), Windows(table, 0)]
    attempts += [Anneal(table, worker) for worker in range(1, budget.workers - 1)]
    return descend(table, budget, attempts)
