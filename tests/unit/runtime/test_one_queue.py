"""Programs end on devices that take all launches from one queue, as verl sets them for Megatron on Hopper."""

import random

import pytest
from toy import random_orders, random_problem

from verl_fuse.spec.problem import Pipeline, ScheduleProblem

pytest.importorskip("greenlet")
from one_queue import Hang, run

from verl_fuse.runtime import nccl

PROGRAMS = 2000


def hangs(programs: int, depth: int, monkeypatch) -> int:
    found = 0
    for seed in range(programs):
        draw = random.Random(seed)
        problem = random_problem(draw)
        try:
            run(problem, random_orders(problem, draw), depth, draw, monkeypatch)
        except Hang:
            found += 1
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_no_random_program_hangs_whatever_depth_is_asked_for(depth, monkeypatch):
    assert hangs(PROGRAMS // 2, depth, monkeypatch) == 0


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


def test_two_messages_on_a_stream_hang_some_programs(monkeypatch):
    monkeypatch.setattr(nccl, "POSTED", 2)
    found = hangs(100, 2, monkeypatch)
    assert found > 0
    print(f"{found} of 100 programs hang with two messages on a stream")
