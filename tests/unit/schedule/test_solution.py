"""How two results of a method compare."""

import numpy as np
import pytest

from verl_fuse.schedule.solution import Solution


def found(makespan: float, *peaks: float) -> Solution:
    return Solution(((),), np.zeros(1), makespan, peaks)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (found(9.0, 5.0, 5.0), found(10.0, 1.0, 1.0)),
        (found(9.0, 3.0, 3.0), found(9.0, 1.0, 4.0)),
        (found(9.0, 3.0, 1.0), found(9.0, 3.0, 2.0)),
    ],
)
def test_the_makespan_decides_then_the_highest_peak_then_their_sum(better: Solution, worse: Solution):
    assert better.key < worse.key
