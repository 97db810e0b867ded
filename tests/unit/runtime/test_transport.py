"""The invariants in the docstring of verl_fuse/runtime/transport.py, over gloo between two processes."""

import os
import signal
from functools import partial

import pytest
import torch
from ranks import CPU, Ranks, World

from verl_fuse.errors import FuseError
from verl_fuse.runtime.gloo import GlooHandle
from verl_fuse.runtime.links import open_links
from verl_fuse.runtime.lost import LostPeer
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse.runtime.transport import Inbox, Outbox

PAIR = [(0, 1)]
SPECS = [TensorSpec((m + 1,), torch.float32) for m in range(5)]


def nothing() -> None:
    """Other messages have left."""


def test_a_message_whose_error_is_known_before_it_is_over_is_never_taken_for_received():
    message = torch.empty(1)
    handle = GlooHandle(message, message, peer=3)
    handle.error = RuntimeError("connection closed")
    assert not handle.done()
    handle.over = True
    with pytest.raises(LostPeer, match="rank 3: connection closed"):
        handle.done()


@pytest.fixture
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def in_order(world: World) -> list[list[float]] | str:
    """Rank 0 sends everything before rank 1 asks for anything."""
    link = world.links(PAIR)[0]
    if world.rank == 0:
        box = Outbox(link.ports["F"], 1)
        for m, spec in enumerate(SPECS):
            box.put(torch.full(spec.shape, float(m)))
        world.store.set("all put", "")
        return "flushed" if box.flush(30, nothing) else "not flushed"
    world.store.wait(["all put"])
    box = Inbox(link.ports["F"], 0, SPECS, 2, CPU)
    messages = [box.take(30, nothing) for _ in SPECS]
    assert box.take(0.0, nothing) is None
    return [message.tolist() for message in messages if message is not None]


def test_messages_are_taken_in_the_order_they_were_put(ranks: Ranks):
    assert ranks.call(in_order) == [
        "flushed",
        [[0.0], [1.0, 1.0], [2.0] * 3, [3.0] * 4, [4.0] * 5],
    ]


def buffers(world: World) -> list[bool] | int:
    """Rank 1 takes nothing until rank 0 has seen that not everything leaves."""
    link = world.links(PAIR)[0]
    if world.rank == 0:
        box = Outbox(link.ports["F"], 1)
        for _ in range(5):
            box.put(torch.ones(100_000))
        blocked = box.flush(0.5, nothing)
        world.store.set("blocked", "")
        return [blocked, box.flush(30, nothing)]
    box = Inbox(link.ports["F"], 0, [TensorSpec((100_000,), torch.float32)] * 5, 2, CPU)
    world.store.wait(["blocked"])
    return sum(int(message[0]) for _ in range(5) if (message := box.take(30, nothing)) is not None)


def test_only_so_many_messages_are_received_ahead(ranks: Ranks):
    assert ranks.call(buffers) == [[False, True], 5]


def killed(world: World) -> list[int]:
    link = world.links(PAIR)[0]
    inbox = Inbox(link.ports["B"], 1, SPECS, 1, CPU) if world.rank == 0 else None
    outbox = Outbox(link.ports["F"], 1) if world.rank == 0 else None
    if inbox is None or outbox is None:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
    outbox.put(torch.zeros(1))
    lost = []
    for wait in (partial(inbox.take, meanwhile=nothing), partial(outbox.flush, meanwhile=nothing)):
        try:
            wait(30)
        except LostPeer as error:
            lost.append(error.peer)
    return lost


def test_a_dead_peer_is_lost_in_both_directions(ranks: Ranks):
    ranks.start(killed)
    survivor, dead = ranks.outcomes()
    assert survivor.value == [1, 1]
    assert dead.exit_code == -signal.SIGKILL


def bad_placement(world: World) -> str:
    try:
        open_links([(0, 2)], CPU)
    except FuseError as error:
        return str(error)
    return ""


def test_a_rank_outside_the_world_is_refused(ranks: Ranks):
    assert ranks.call(bad_placement)[0] == "pipeline 0: ranks=[0, 2]; needs different ranks out of 0..1"
