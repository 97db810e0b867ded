import pytest

from verl_fuse_cpu.task.euclid import Pair
from verl_fuse_cpu.task.reward import compute_score

TRACE = Pair(12, 18).trace


def score(response):
    return compute_score(
        data_source="verl_fuse_cpu/euclid", solution_str=response, ground_truth=TRACE, extra_info={"index": 0}
    )


def test_the_whole_trace_earns_the_reward():
    assert score(TRACE) == {"score": 1.0, "acc": 1.0}
    assert score(f" {TRACE}\n") == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    "response",
    [
        "",
        "=06",
        "06",
        "12 06;=06",
        "12 06;06 06;=07",
        "12 06;06 06;",
        "12 06;06 06;=06=06",
        "12 06;06 06;=06;06 06;=06",
        "12 07;06 06;=06",
        "12  06;06 06;=06",
        "十二 06;=06",
    ],
)
def test_anything_else_earns_nothing(response):
    assert score(response) == {"score": 0.0, "acc": 0.0}
