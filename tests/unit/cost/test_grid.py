"""Interpolation between measurements, and beyond them."""

import numpy as np
import pytest

from verl_fuse.cost.grid import MeasuredGrid

GRID = MeasuredGrid(
    np.array([1.0, 4.0, 16.0]), np.array([10.0, 100.0]), np.array([[1.0, 2.0], [3.0, 8.0], [5.0, 40.0]])
)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(2))
def test_measured_points_are_met(row: int, column: int):
    assert GRID.at(GRID.batches[row], GRID.lengths[column]) == pytest.approx(GRID.seconds[row, column])


def test_between_points_the_answer_lies_between():
    assert GRID.at(2, 10) == pytest.approx(3**0.5)
    assert 1.0 < GRID.at(2, 30) < 8.0


def test_below_the_grid_overhead_remains():
    assert GRID.at(0.5, 10) == GRID.at(1, 1) == pytest.approx(1.0)


def test_beyond_the_grid_seconds_grow_in_proportion():
    assert GRID.at(32, 100) == pytest.approx(80.0)
    assert GRID.at(16, 300) == pytest.approx(120.0)


def test_arrays():
    assert GRID.at(np.array([1.0, 16.0]), np.array([10.0, 100.0])).tolist() == pytest.approx([1.0, 40.0])


def test_a_single_point_is_a_grid():
    single = MeasuredGrid(np.array([4.0]), np.array([10.0]), np.array([[3.0]]))
    assert [float(single.at(*point)) for point in ((4, 10), (1, 5), (8, 10))] == pytest.approx([3.0, 3.0, 6.0])
