"""Programs end on devices that take all launches from one queue, as verl sets them for Megatron on Hopper."""

import random

import pytest
from toy import random_orders, random_problem

from verl_fuse.spec.problem import Pipeline, ScheduleProblem

pytest.importorskip("greenlet")
from one_queue import Hang, run

from verl_fuse.runtime.nccl import NcclPort


def hangs(seeds: range, depth: int, monkeypatch, width: int = 1) -> int:
    found = 0
    for seed in seeds:
        draw = random.Random(seed)
        problem = random_problem(draw)
        try:
            run(problem, random_orders(problem, draw), depth, draw, monkeypatch, width)
        except Hang:
            found += 1
    return found


@pytest.mark.parametrize(("depth", "seeds"), [(1, range(1000)), (2, range(1000, 2000))])
def test_no_random_program_hangs_whatever_depth_is_asked_for(depth, seeds, monkeypatch):
    assert hangs(seeds, depth, monkeypatch) == 0


def test_no_random_program_hangs_where_stages_have_two_ranks(monkeypatch):
    """An op that waits for the other rank's op keeps work launched behind it from starting, messages too."""
    assert hangs(range(2000, 2300), 2, monkeypatch, width=2) == 0


@pytest.mark.parametrize(
    "placement", [((0, 1), (0, 1)), ((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (1, 0, 2)), ((0, 2), (1, 3), (1, 0), (3, 2))]
)
def test_ranks_that_have_nothing_left_to_run_let_all_their_messages_leave(placement, monkeypatch):
    """A rank that waits for one message to leave has others that somebody waits for."""
    for seed in range(60):
        draw = random.Random(seed)
        pipelines = (Pipeline("actor" if i == 0 else "critic", ranks, 5, 1, 2, 1) for i, ranks in enumerate(placement))
        problem = ScheduleProblem(1 + max(map(max, placement)), tuple(pipelines))
        run(problem, random_orders(problem, draw), 2, draw, monkeypatch)


@pytest.mark.parametrize("width", [1, 2])
def test_two_messages_on_a_stream_hang_some_programs(width, monkeypatch):
    monkeypatch.setattr(NcclPort, "most", 2)
    found = hangs(range(100), 2, monkeypatch, width)
    assert found > 50
    print(f"{found} of 100 programs hang with two messages on a stream, {width} ranks a stage")
