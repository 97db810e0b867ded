"""The invariants in the docstring of verl_fuse/runtime/reshard/transfer.py on real processes."""

import threading
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from ranks import Ranks, World
from transfers import LLAMA, QWEN2, content, different, opened, placed, planned, tensors_of, transfer

from verl_fuse.reshard.program import TransferProgram, lower_bound
from verl_fuse.runtime.reshard.version import WeightVersion

RANKS = 8
MEGATRON = tuple(
    f"megatron tp{tp} pp{pp} dp{dp}"
    for tp in (1, 2, 4)
    for pp in (1, 2, 3, 4)
    for dp in sorted({1, 8 // (tp * pp)})
    if 0 < tp * pp * dp <= RANKS
)
LAYOUTS = (*MEGATRON, "fsdp 3", "fsdp 4", "fsdp 8", "fsdp 2x4", "replicated 8", "vllm tp2 dp4", "vllm tp4")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        ranks.call(start)
        yield ranks


def start(world: World) -> bool:
    """Open the port and the watch that all transfers of this set of processes use."""
    world.opened = opened(world, "all")  # pyright: ignore[reportAttributeAccessIssue]
    return True


def there_and_back(world: World, programs: list[tuple[TransferProgram, TransferProgram]]) -> list[str]:
    """Return the tensors that are not bitwise right, from one layout to the other and back."""
    weights = programs[0][0].weights
    whole = content(weights)
    expected = {str(p.source): tensors_of(p.source, weights, world.rank, whole) for pair in programs for p in pair}
    blank = {str(p.source): tensors_of(p.source, weights, world.rank, None) for pair in programs for p in pair}
    wrong = []
    for there, back in programs:
        first = expected[str(there.source)]
        second, again = ({name: tensor.clone() for name, tensor in blank[str(p.target)].items()} for p in (there, back))
        transfer(there, world.opened).run(first, second, 1)  # pyright: ignore[reportAttributeAccessIssue]
        bad = different(second, expected[str(there.target)])
        transfer(back, world.opened).run(second, again, 1)  # pyright: ignore[reportAttributeAccessIssue]
        bad += different(again, first)
        wrong += [f"{there.source} and {there.target}: {name}" for name in bad]
    return wrong


@pytest.mark.parametrize("weights", [QWEN2, LLAMA], ids=lambda weights: weights.model.name)
def test_all_pairs_of_layouts_are_bitwise_equal_there_and_back(ranks: Ranks, weights: Any):
    """Every ordered pair; LLaMA's layouts each with another."""
    pairs = list(combinations_with_replacement(LAYOUTS, 2))
    if weights is LLAMA:
        pairs = [(text, LAYOUTS[(place + 5) % len(LAYOUTS)]) for place, text in enumerate(LAYOUTS)]
    programs = []
    for pair in pairs:
        one, other = (placed(text, weights) for text in pair)
        both = planned(weights, one, other, RANKS, bucket=1 << 20), planned(weights, other, one, RANKS, bucket=1 << 20)
        assert all((p.bytes, p.network_bytes) == lower_bound(p) for p in both)
        programs.append(both)
    assert [wrong for wrong in ranks.call(there_and_back, programs) if wrong] == []


def converted(world: World, program: TransferProgram, wire: str, have: str, want: str, checksums: bool) -> list[str]:
    """Return the tensors that differ from the content converted from one type to the other in one step."""
    whole = content(program.weights, 1, getattr(torch, have))
    source = tensors_of(program.source, program.weights, world.rank, whole, getattr(torch, have))
    target = tensors_of(program.target, program.weights, world.rank, None, getattr(torch, want))
    options = {"dtype": getattr(torch, wire), "checksums": checksums}
    transfer(program, world.opened, **options).run(source, target, 1)  # pyright: ignore[reportAttributeAccessIssue]
    expected = tensors_of(program.target, program.weights, world.rank, whole, getattr(torch, want))
    return different(target, expected)


@pytest.mark.parametrize(
    ("wire", "have", "want"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float16"),
    ],
)
def test_types_are_converted_once(ranks: Ranks, wire: str, have: str, want: str):
    program = planned(
        QWEN2, placed("fsdp 4", QWEN2), placed("vllm tp2 dp4", QWEN2), RANKS, item=getattr(torch, wire).itemsize
    )
    assert ranks.call(converted, program, wire, have, want, True) == [[]] * RANKS


def run_twice(world: World, program: TransferProgram) -> tuple[int, int, int, int | None]:
    """(sent, received, extra bytes) of the second run, and the version that was agreed on."""
    weights = program.weights
    mover = transfer(program, world.opened)  # pyright: ignore[reportAttributeAccessIssue]
    target, held_version = tensors_of(program.target, weights, world.rank, None), WeightVersion("copy")
    for version in (7, 8):
        source = tensors_of(program.source, weights, world.rank, content(weights, version))
        holds = world.rank in program.source.ranks
        report = mover.run(source, target, version if holds else None, held_version)
        expected = tensors_of(program.target, weights, world.rank, content(weights, version))
        assert different(target, expected) == []
        held_version.require(version)
    return report.sent_bytes, report.received_bytes, report.extra_bytes, report.version


def test_a_program_runs_again_within_a_bucket_and_versions_come_from_the_holders(ranks: Ranks):
    program = planned(LLAMA, placed("fsdp 4", LLAMA), placed("vllm tp4", LLAMA, 4), RANKS, bucket=40_000)
    outcomes = ranks.call(run_twice, program)
    assert sum(received for _, received, _, _ in outcomes) == program.bytes
    assert sum(sent for sent, _, _, _ in outcomes) == program.bytes
    assert all(extra <= 40_000 for _, _, extra, _ in outcomes)
    assert max(extra for _, _, extra, _ in outcomes) > 19_000
    assert [version for *_, version in outcomes] == [8] * RANKS


def opened_and_closed(world: World, program: TransferProgram) -> list[str]:
    """Names of the threads that are left of a port and a watch of their own."""
    before = set(threading.enumerate())
    source = tensors_of(program.source, program.weights, world.rank, content(program.weights))
    target = tensors_of(program.target, program.weights, world.rank, None)
    port, watch, rank = opened(world, "closed")
    transfer(program, (port, watch, rank)).run(source, target, 1)
    port.close()
    watch.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10)
    return [thread.name for thread in left if thread.is_alive()]


def test_a_closed_port_leaves_no_threads(ranks: Ranks):
    program = planned(LLAMA, placed("fsdp 4", LLAMA), placed("vllm tp4", LLAMA, 4), RANKS)
    assert ranks.call(opened_and_closed, program) == [[]] * RANKS
