"""The portfolio: constraint solving and annealing pursue the same goals, from the same incumbent, and stop when value and bound meet.

The constraint solver is quick where the goal is tight or impossible, annealing where the problem is large.
"""

from verl_fuse.schedule.annealed import Anneal
from verl_fuse.schedule.descent import Attempt, descend
from verl_fuse.schedule.exact import Exact
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable


def portfolio(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """One constraint solver; every other worker anneals."""
    attempts: list[Attempt] = [Exact(table)]
    attempts += [Anneal(table, worker) for worker in range(max(1, budget.workers - 1))]
    return descend(table, budget, attempts)
