"""Back-to-back 1F1B: keeps the serial orders, but a rank starts the next model as soon as it has finished
its part of the one before."""

from verl_fuse.schedule.one_f_one_b import rank_orders
from verl_fuse.schedule.solution import Budget, Solution, from_orders
from verl_fuse.schedule.table import OpTable


def back_to_back(table: OpTable, budget: Budget | None = None) -> Solution:
    """Return 1F1B of every pipeline in the problem's order, without barriers; takes no time worth a budget."""
    solution = from_orders(table, rank_orders(table, list(range(len(table.problem.pipelines)))))
    assert solution is not None, "pipelines that run in the same order on every rank cannot deadlock"
    return solution
