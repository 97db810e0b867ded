"""Programs end on devices that take all launches from one queue, as verl sets them for Megatron on Hopper."""

import random

import pytest
from toy import random_orders, random_problem

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


def test_two_messages_on_a_stream_hang_some_programs(monkeypatch):
    monkeypatch.setattr(nccl, "POSTED", 2)
    found = hangs(100, 2, monkeypatch)
    assert found > 0
    print(f"{found} of 100 programs hang with two messages on a stream")
