"""The invariants in the docstring of verl_fuse/runtime/reshard/stream.py on real processes."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks, World
from transfers import LLAMA, QWEN2, content, opened, placed, tensors_of

from verl_fuse.errors import FuseError
from verl_fuse.reshard.loadable import LoadableSharding
from verl_fuse.reshard.parameters import ModelParameters
from verl_fuse.reshard.program import lower_bound, plan_transfer
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.runtime.reshard.stream import ParameterStream, StreamRoute

RANKS = 4
BUCKET = 1 << 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        yield ranks


def route(
    weights: ModelParameters, source: str, engines: VllmSharding, first: int, dtype: torch.dtype = torch.float32
) -> StreamRoute:
    nodes = tuple(rank // 2 for rank in range(RANKS))
    return StreamRoute(
        weights,
        placed(source, weights),
        PlacedSharding.at(LoadableSharding(engines), first),
        nodes,
        dtype,
        BUCKET,
        True,
    )


def streamed(world: World, name: str, way: StreamRoute) -> tuple[int, int, int]:
    """Compare what arrives with the content, twice; bytes received, buffers needed at most, number of chunks."""
    port, watch, rank = opened(world, name)
    stream = ParameterStream("copy", way, rank, port, watch)
    mine = {tensor.name: tensor for tensor in way.target.tensors(way.weights, rank)}
    for version in (3, 4):
        whole = content(way.weights, version)
        seen = []
        for parameter, found in stream.run(tensors_of(way.source, way.weights, rank, whole), version):
            assert stream.held_version.version is None, "not before all of it has been taken"
            expected = torch.full(mine[parameter].shape, torch.nan, dtype=way.dtype)
            for piece in mine[parameter].pieces:
                at = (piece.rows, piece.columns), (piece.stride, 1), piece.offset
                part = whole[parameter][piece.row :, piece.column :][: piece.rows, : piece.columns]
                expected.as_strided(*at).copy_(part)
            assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0)), parameter
            seen.append(parameter)
        assert seen == list(mine), "all it loads, in the order of the model"
        stream.held_version.require(version)
    received = sum(report.received_bytes for report in stream.reports)
    return received, max(report.extra_bytes for report in stream.reports), len(stream.reports)


CASES = {
    "hybrid tp1": (QWEN2, "fsdp 4", VllmSharding(1, 4), 0),
    "hybrid tp2": (QWEN2, "fsdp 4", VllmSharding(2, 2), 0),
    "hybrid tp4 in two copies": (LLAMA, "fsdp 2x2", VllmSharding(4), 0),
    "standalone tp2": (LLAMA, "fsdp 2", VllmSharding(2), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_what_it_loads_and_nothing_else(ranks: Ranks, name: str, dtype: torch.dtype):
    way = route(*CASES[name], dtype)
    found = ranks.call(streamed, f"{name} {dtype}", way)
    whole = plan_transfer(way.weights, way.source, way.target, nodes=way.nodes, item_bytes=dtype.itemsize)
    assert sum(received for received, _, _ in found) == lower_bound(whole)[0]
    assert all(extra <= BUCKET // 2 + 64 and count > 5 for _, extra, count in found), "64: four checksums"


def abandoned(world: World, way: StreamRoute) -> str:
    port, watch, rank = opened(world, "abandoned")
    stream = ParameterStream(f"copy {rank}", way, rank, port, watch)
    tensors = tensors_of(way.source, way.weights, rank, content(way.weights))
    loading = stream.run(tensors, 1)
    for _ in loading:
        if len(stream.reports) == 2:
            break
    loading.close()
    try:
        stream.held_version.require(1)
    except FuseError as error:
        return str(error)
    return ""


def test_weights_that_were_not_all_taken_have_no_version(ranks: Ranks):
    assert ranks.call(abandoned, route(*CASES["hybrid tp2"])) == [
        f"weights 'copy {rank}': version 1 is needed, they are incomplete: a transfer was not finished"
        for rank in range(RANKS)
    ]


def disagreeing(world: World, way: StreamRoute) -> str:
    port, watch, rank = opened(world, "versions")
    stream = ParameterStream("copy", way, rank, port, watch)
    list(stream.run(tensors_of(way.source, way.weights, rank, content(way.weights)), 7 if rank == 2 else 6))
    return "streamed"


def test_ranks_of_different_versions_stop_before_anything_is_loaded(ranks: Ranks):
    ranks.start(disagreeing, route(*CASES["hybrid tp2"]))
    errors = [outcome.error for outcome in ranks.outcomes(60)]
    assert all("different versions: 6 on ranks [0, 1, 3] against 7 on ranks [2]" in error for error in errors), errors


def killed(world: World, way: StreamRoute, victim: int) -> list:
    """The victim ends in the middle; what the others had loaded, their error and the version they hold."""
    port, watch, rank = opened(world, "killed", timeout=20.0)
    stream = ParameterStream("copy", way, rank, port, watch)
    loaded, error = 0, ""
    try:
        for _ in stream.run(tensors_of(way.source, way.weights, rank, content(way.weights)), 1):
            loaded += 1
            if rank == victim and len(stream.reports) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    except FuseError as stopped:
        error = str(stopped)
    return [loaded, error, stream.held_version.version]


@pytest.mark.parametrize("victim", [1, 3])
def test_a_receiver_that_dies_ends_the_stream_on_every_rank_by_name(victim: int):
    with Ranks(RANKS) as ranks:
        way = route(*CASES["hybrid tp2" if victim == 1 else "standalone tp2"])
        ranks.start(killed, way, victim)
        outcomes = ranks.outcomes(60)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank in set(range(RANKS)) - {victim}:
        loaded, error, version = outcomes[rank].value
        assert loaded < len(way.weights.parameters)
        assert f"rank {victim} " in error, error
        assert "weight transfer stopped" in error
        assert version is None
