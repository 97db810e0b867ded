"""Serial 1F1B: the models train one after the other, like without fusion; a model starts when the model before it has
ended on every rank."""

import numpy as np

from verl_fuse.schedule.one_f_one_b import rank_orders, waves
from verl_fuse.schedule.solution import Budget, Solution, from_starts
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.timing import earliest_starts, orders_of


def serial(table: OpTable, budget: Budget) -> Solution:
    """Run all copies of a model side by side, one model after the other."""
    starts, now = np.zeros(len(table)), 0.0
    for wave in waves(table):
        alone = earliest_starts(table, rank_orders(table, wave))
        assert alone is not None, "1F1B of pipelines on different ranks cannot deadlock"
        runs = alone >= 0
        starts[runs] = alone[runs] + now
        now += float((alone + table.duration)[runs].max())
    return from_starts(table, orders_of(table, starts), starts)
