"""The compiled list scheduling against the plain one."""

import numpy as np
import pytest
from problems import PUBLISHED, published

from verl_fuse.schedule.greedy import in_flight, list_schedule
from verl_fuse.schedule.priorities import EXTRAS, PrioritySearch
from verl_fuse.schedule.solution import from_orders
from verl_fuse.schedule.table import OpTable
from verl_fuse.schedule.ticks import scales
from verl_fuse.schedule.timing import orders_of, rank_peaks


@pytest.mark.parametrize("row", [PUBLISHED[1], PUBLISHED[10]], ids=lambda row: f"instance{row['id']}")
@pytest.mark.parametrize("extra", EXTRAS)
def test_neutral_priorities_build_the_greedy_schedule(row, extra):
    table, capacity = OpTable(published(row)), row["paper_mem_annealed"]
    search = PrioritySearch(table, scales(table), capacity)
    end, starts = search.run(search.limits[EXTRAS.index(extra)], search.neutral)
    orders = list_schedule(table, in_flight(table, extra, capacity), capacity)
    plain = from_orders(table, orders) if orders is not None else None
    assert end == (-1 if plain is None else plain.makespan)
    assert plain is None or orders_of(table, starts.astype(float)) == [list(order) for order in plain.orders]


def test_a_climb_shortens_within_the_capacity_and_repeats():
    table, capacity = OpTable(published(PUBLISHED[10])), 32.16
    climbs = [PrioritySearch(table, scales(table), capacity).climb(np.random.default_rng(0), 300) for _ in range(2)]
    assert climbs[0] is not None
    assert climbs[0].tolist() == climbs[1].tolist()
    assert float((climbs[0] + table.duration).max()) < 340.0
    assert rank_peaks(table, orders_of(table, climbs[0].astype(float))).max() <= capacity


def test_a_climb_stops_when_it_is_told_to(monkeypatch):
    table = OpTable(published(PUBLISHED[1]))
    search, ran = PrioritySearch(table, scales(table), float("inf")), []
    monkeypatch.setattr(search, "run", lambda *tried: ran.append(tried) or PrioritySearch.run(search, *tried))
    assert search.climb(np.random.default_rng(0), 300, lambda: len(ran) == 10) is not None
    assert len(ran) == 10
