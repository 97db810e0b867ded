"""The portfolio: every way to search pursues the same goals, from the same incumbent, until value and bound meet.

CP-SAT on the whole problem settles small ones. CP-SAT with limits on micro-batches in flight reaches the bound of large ones and annealing drains the
memory that takes. Within little memory, annealing of the makespan comes near the bound and window search closes what is left.
"""

from verl_fuse.schedule.annealed import Anneal
from verl_fuse.schedule.descent import Attempt, descend
from verl_fuse.schedule.exact import Exact
from verl_fuse.schedule.limited import Limited
from verl_fuse.schedule.slim import Slim
from verl_fuse.schedule.solution import Bounds, Budget, Solution
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.windows import Windows

SMALL = 800
"""Up to this many ops the whole problem is not too much for the constraint solver, which then has the first turn: it often ends the round alone."""


def portfolio(table: OpTable, budget: Budget) -> tuple[Solution, Bounds]:
    """All attempts, in an order that depends on size, on as many threads as the budget has workers."""
    whole: list[Attempt] = [Exact(table)] if len(table) <= SMALL else []
    workers = range(max(2, budget.workers))
    annealing = [Anneal(table, worker) for worker in workers]
    polishing = [Windows(table, worker) for worker in workers]
    return descend(table, budget, [*whole, Limited(table, 0), Slim(table, 0), *annealing, *polishing])
