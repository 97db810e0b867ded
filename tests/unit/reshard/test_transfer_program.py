"""The invariants in the docstrings of verl_fuse/reshard/program.py and routes.py."""

import dataclasses
import random

import numpy as np
import pytest
from layouts import LLAMA, QWEN2, random_pair
from ortools.linear_solver import pywraplp
from transfer_check import check
from transfer_seconds import load, sent

from verl_fuse.errors import FuseError
from verl_fuse.reshard.program import TransferProgram, lower_bound, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.text import sharding_from

PAIRS = 300
# Twelve tests of as many pairs each, so that one failure names few.
BATCHES = 12


def random_program(seed: int) -> TransferProgram:
    draw = random.Random(seed)
    weights, source, target, nodes = random_pair(draw, draw.choice((8, 16, 32, 64)))
    bucket = draw.choice((2_000, 20_000, 2_000_000))
    return plan_transfer(weights, source, target, nodes=nodes, item_bytes=2, bucket_bytes=bucket)


def program(source: str, target: str, first: int = 0, per_node: int = 8, bucket: int = 1 << 20) -> TransferProgram:
    """Of the small LLaMA, the target's ranks from `first` on."""
    have, want = PlacedSharding.at(sharding_from(source)), PlacedSharding.at(sharding_from(target), first)
    nodes = [rank // per_node for rank in range(max(*have.ranks, *want.ranks) + 1)]
    return plan_transfer(LLAMA, have, want, nodes=nodes, item_bytes=2, bucket_bytes=bucket)


def ideal_load(program: TransferProgram, *, far: bool) -> float:
    """The smallest possible largest number of bytes a holder sends, if every node that lacks a stream is
    served once: a linear program."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    most = solver.NumVar(0, solver.infinity(), "most")
    sent: dict[int, list] = {}
    streams, nodes = program.streams, program.nodes
    for source, target, size in zip(streams.source, streams.target, streams.size, strict=True):
        held = streams.groups[source]
        for node in {nodes[rank] for rank in set(streams.groups[target]) - set(held)}:
            near = [rank for rank in held if nodes[rank] == node]
            if bool(near) == far:
                continue
            parts = [(rank, solver.NumVar(0, float(size), "")) for rank in near or held]
            solver.Add(sum(part for _, part in parts) == float(size))
            for rank, part in parts:
                sent.setdefault(rank, []).append(part)
    for parts in sent.values():
        solver.Add(sum(parts) <= most)
    solver.Minimize(most)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return most.solution_value() * program.item_bytes


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_pairs_move_the_lower_bound_and_share_the_load(batch: int):
    """Every element followed; bytes; largest load within 10 % of the linear program's (and a few elements,
    where there are few in all)."""
    for seed in range(batch, PAIRS, BATCHES):
        transfer = random_program(seed)
        check(transfer)
        assert (transfer.bytes, transfer.network_bytes) == lower_bound(transfer), seed
        for far in (False, True):
            slack = 8 * transfer.item_bytes
            assert sent(transfer, far=far).max() <= 1.1 * ideal_load(transfer, far=far) + slack, (seed, far)


def test_equal_layouts_move_nothing():
    assert program("megatron tp2 pp2", "megatron tp2 pp2").bytes == 0


def test_a_rank_keeps_what_it_holds():
    """Rank 0 of tp2 has half of the elements that rank 0 of tp1 wants; rank 1 has all that it wants."""
    transfer = program("replicated 2", "megatron tp2")
    assert (transfer.bytes, len(transfer.sends(0))) == (0, 0)
    back = program("megatron tp2", "replicated 2")
    split = sum(p.elements for p in LLAMA.parameters if p.kind != "whole")
    assert back.bytes == 2 * split


def test_one_copy_crosses_to_each_node_and_both_holders_send_half():
    transfer = program("replicated 2", "replicated 8", first=4, per_node=4)
    whole = 2 * LLAMA.elements
    assert (transfer.bytes, transfer.network_bytes) == (8 * whole, 2 * whole)
    assert list(sent(transfer, far=True)[:2]) == [whole, whole]
    # Every rank of a receiving node gets a quarter over the network.
    received = load(transfer, far=True)[1]
    assert np.ptp(received[4:12]) <= 8 * transfer.item_bytes


def test_a_message_is_a_quarter_of_the_bucket_at_most():
    transfer = program("fsdp 4", "megatron tp2 dp2", bucket=4000)
    sizes = [message.elements * 2 for rank in range(4) for message in transfer.sends(rank)]
    assert 900 < max(sizes) <= 1000


def test_the_same_arguments_make_the_same_program():
    assert random_program(3).digest == random_program(3).digest != random_program(4).digest


FAULTS = {"lost": "never gets", "sent twice": "has them already", "not there": "the sender does not have them"}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds_faults(fault: str):
    transfer = program("fsdp 4", "megatron tp2 pp2")
    hops = transfer.hops
    if fault == "lost":
        hops = type(hops)(**{name: value[:-1] for name, value in vars(hops).items()})
    elif fault == "sent twice":
        again = {name: np.append(value, value[-1:]) for name, value in vars(hops).items()}
        again["round"][-1] += 1
        hops = type(hops)(**again)
    else:
        hops = dataclasses.replace(hops, sender=(hops.sender + 1) % 4)
    with pytest.raises(FuseError, match=FAULTS[fault]):
        check(dataclasses.replace(transfer, hops=hops))


def test_a_bucket_too_small_for_an_element_is_refused():
    with pytest.raises(FuseError, match="bucket_bytes=7; needs at least 8"):
        program("fsdp 4", "fsdp 2", bucket=7)


def test_ranks_without_a_node_are_refused():
    placed = PlacedSharding.at(sharding_from("fsdp 4"))
    with pytest.raises(FuseError, match=r"layout fsdp 4 on 0-3: nodes are given for ranks 0 to 1"):
        plan_transfer(QWEN2, placed, placed, nodes=[0, 0])
