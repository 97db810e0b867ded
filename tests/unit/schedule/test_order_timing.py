"""Times and memory of hand-made orders."""

from problems import two_ranks

from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.timing import earliest_starts, makespan, orders_of, rank_peaks


def orders(table: OpTable, *rows: str) -> list[list[int]]:
    """`0F1` on rank r -> op id."""
    found = []
    for rank, row in enumerate(rows):
        stages = [p.ranks.index(rank) for p in table.problem.pipelines]
        found.append([table.id(int(t[0]), stages[int(t[0])], int(t[1] == "B"), int(t[2])) for t in row.split()])
    return found


def test_earliest_starts_and_memory():
    table = OpTable(two_ranks(1, transfer=0.5))
    rows = orders(table, "0F0 1F0 1B0 0B0", "1F0 0F0 0B0 1B0")
    starts = earliest_starts(table, rows)
    assert starts is not None
    #                          0F@0 0B@0 0F@1 0B@1 1F@1 1B@1 1F@0 1B@0
    assert starts.tolist() == [0, 5.0, 1.5, 2.5, 0, 5.0, 1.5, 2.5]
    assert makespan(table, starts) == 7.0
    assert rank_peaks(table, rows).tolist() == [2.0, 2.0]
    assert orders_of(table, starts) == rows


def test_ranks_that_wait_for_each_other():
    table = OpTable(two_ranks(1))
    assert earliest_starts(table, orders(table, "1F0 0F0 0B0 1B0", "0F0 1F0 1B0 0B0")) is None
