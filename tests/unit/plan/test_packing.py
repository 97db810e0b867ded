import itertools

import numpy as np
import pytest

from verl_fuse.plan.packing import three_calls


def least(*pairs: tuple[int, float], devices: int = 4) -> np.ndarray:
    """Least seconds on at most so many devices, from (devices, seconds)."""
    row = np.full(devices + 1, np.inf)
    for size, seconds in pairs:
        row[size] = min(row[size], seconds)
    return np.minimum.accumulate(row)


def test_three_that_fit_side_by_side():
    assert three_calls(least((1, 3.0)), least((1, 2.0)), least((2, 1.0))) == 3.0


def test_two_of_three_follow_each_other_where_only_pairs_fit():
    assert three_calls(*[least((2, 5.0))] * 3) == 10.0


def test_everything_everywhere_is_serial():
    assert three_calls(least((4, 1.0)), least((3, 2.0)), least((3, 4.0))) == 7.0


def best_on_a_row(jobs, devices: int = 4) -> float:
    """The least makespan of (devices, seconds) jobs on a row of devices, by trying every order and
    position with early starts."""
    best = np.inf
    for order in itertools.permutations(jobs):
        for firsts in itertools.product(*[range(devices - size + 1) for size, _ in order]):
            free = np.zeros(devices)
            for (size, seconds), first in zip(order, firsts, strict=True):
                free[first : first + size] = free[first : first + size].max() + seconds
            best = min(best, free.max())
    return best


@pytest.mark.parametrize("seed", range(30))
def test_no_placement_is_faster(seed: int):
    rng = np.random.default_rng(seed)
    calls = [
        [(int(size), float(rng.uniform(1, 5))) for size in rng.choice([1, 2, 3, 4], 2, replace=False)] for _ in range(3)
    ]
    brute = min(best_on_a_row(jobs) for jobs in itertools.product(*calls))
    assert three_calls(*[least(*pairs) for pairs in calls]) <= brute + 1e-9
